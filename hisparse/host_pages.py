"""Which pages of the host pool belong to which request."""

from __future__ import annotations

import numpy as np


class CapacityError(RuntimeError):
    """A cache has no room: the message says of what, how much was needed and how much there was. Nothing was changed.

    Attributes:
        what: "requests", "host tokens" or "max_context".
        needed, available: In requests or tokens.
    """

    def __init__(self, what: str, needed: int, available: int) -> None:
        super().__init__(f"not enough {what}: needed {needed}, available {available}")
        self.what, self.needed, self.available = what, needed, available


class HostPages:
    """A stack of free pages: those that were given back last are given out first, wherever they are."""

    def __init__(self, tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.count = self.free = -(-tokens // page_size)
        self._stack = np.arange(self.count)[::-1].copy()
        self._owned: dict[int, list[int]] = {}

    def take(self, count: int) -> np.ndarray:
        """int64 [count] pages, which are the caller's until they are assigned and given back."""
        if count > self.free:
            raise CapacityError("host tokens", count * self.page_size, self.free * self.page_size)
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def assign(self, request: int, pages: np.ndarray) -> None:
        self._owned.setdefault(request, []).extend(pages.tolist())

    def give_back(self, request: int) -> None:
        pages = self._owned.pop(request)
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)

    def locs(self, request: int) -> np.ndarray:
        """int64 [tokens of its pages], by position."""
        return self.locs_of(np.array(self._owned[request], np.int64))

    def locs_of(self, pages: np.ndarray) -> np.ndarray:
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
