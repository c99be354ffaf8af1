"""A progress bar on standard error that stays silent where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(steps: Sequence[T], label: str) -> Iterator[T]:
    """Yields the steps and redraws the bar at most ten times a second, on a terminal only."""
    watched = sys.stderr.isatty()
    shown_at = 0.0
    for done, step in enumerate(steps):
        if watched and time.monotonic() - shown_at > 0.1:
            shown_at = time.monotonic()
            bar = "#" * (30 * done // len(steps))
            print(f"\r{label} [{bar:<30}] {done}/{len(steps)}", end="", file=sys.stderr, flush=True)
        yield step
    if watched:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
