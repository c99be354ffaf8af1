"""The messages of docs/troubleshooting.md, as patterns: `...` in them stands for anything."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^### `(.*)`$", PAGE.read_text(), re.MULTILINE)


def matches(listed: str, message: str) -> bool:
    return re.fullmatch(".+".join(map(re.escape, listed.split("..."))), message) is not None


def check(start: str, message: str) -> None:
    """`start` is how the listed message begins; no other begins so."""
    (listed,) = (listed for listed in MESSAGES if listed.startswith(start))
    assert matches(listed, message), f"listed: {listed}\nraised: {message}"
