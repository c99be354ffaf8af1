"""README.md is the site's first page: its links lead from the tree's root, those of the site from docs/."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

README = Path(__file__).resolve().parent.parent / "README.md"


def _as_text(markdown: str, target: str) -> str:
    """Source files are no part of the site: of links to them the text stays, as code."""
    return re.sub(rf"(?<!!)\[`?([^\]`]+)`?\]\({target}\)", r"`\1`", markdown)


def _in_docs(markdown: str) -> str:
    return _as_text(re.sub(r"\]\(docs/", "](", markdown), r"(?!https?://|#|[\w/]+\.md)[^)]*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "index.md", content=_in_docs(README.read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _as_text(markdown.replace("](../README.md", "](index.md"), r"\.\./[^)]*")
