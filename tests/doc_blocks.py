"""The code blocks of README.md and docs/, and what a comment right before one says of it:

- `<!-- needs a GPU -->`: it runs where there is one
- `<!-- not run by the tests: REASON -->`: it runs nowhere
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
NEEDS_GPU, NOT_RUN = "needs a GPU", "not run by the tests: "


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    remark: str

    @property
    def runs(self) -> bool:
        return not self.remark.startswith(NOT_RUN)


def blocks(page: str, *languages: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(r"(?:^<!-- ([^\n]*) -->\n)?^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        remark, language, code = match.groups()
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(page, line, language, code, remark or ""))
    return [block for block in found if not languages or block.language in languages]


def run_python_blocks(page: str, with_gpu: bool = False) -> dict:
    """Runs the page's code from top to bottom; returns the names that it leaves."""
    names: dict = {}
    for block in blocks(page, "python"):
        if not block.runs or (block.remark == NEEDS_GPU and not with_gpu):
            continue
        if re.search(r"^(import|from) torch", block.code, re.MULTILINE):
            pytest.importorskip("torch")
        # With the lines of the page, for a traceback that leads there.
        exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec"), names)
    return names
