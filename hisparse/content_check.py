"""The opt-in check of contents: what an op takes on trust, looked at on the device before it runs.

Arguments are always checked, but what lies in device memory is not: that takes a kernel of its own and a wait for it.
``HISPARSE_CHECK=1`` in the environment, read at import, or ``with hisparse.checking():`` asks for it. A fault raises
:class:`ContentError` with the argument, row and column, before the op changes anything. docs/reliability.md says what
is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from . import _C


class ContentError(ValueError):
    """A tensor's contents break the contract of the op that was called.

    Attributes:
        argument: The tensor's name among the op's arguments.
        row: Where the fault is in it: its first index, such as the request of a per-request table.
        column: The second one; None for a vector.
    """

    def __init__(self, message: str, argument: str, row: int, column: int | None):
        super().__init__(message)
        self.argument, self.row, self.column = argument, row, column

    def __reduce__(self):
        return type(self), (str(self), self.argument, self.row, self.column)


@contextmanager
def checking() -> Iterator[None]:
    """Checks the contents of all calls inside the ``with`` block, in every thread of the process.

    Each call then waits for its stream, so it cannot be captured in a graph: such a call raises RuntimeError. A graph
    that was captured without the check is replayed without it.
    """
    _C.add_content_checks(1)
    try:
        yield
    finally:
        _C.add_content_checks(-1)


def _read_environment() -> None:
    value = os.environ.get("HISPARSE_CHECK", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"HISPARSE_CHECK: expected 0 or 1, got {value!r}")
    if value == "1":
        _C.add_content_checks(1)


_read_environment()
