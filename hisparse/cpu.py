"""Options of the CPU target: how it runs the GPU kernels on the host.

They hold for the whole process. Where none are set here, environment variables say what they are, read at each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Literal

from . import _C


@dataclass(frozen=True)
class Options:
    """How the CPU target runs kernels.

    Attributes:
        warp_size: Threads of a warp, 32 or 64. HISPARSE_CPU_WARP_SIZE, 64 where that is unset.
        seed: Random order of threads between two barriers, drawn from this seed; None runs them in order.
            HISPARSE_CPU_SEED.
        strict: Threads that leave a kernel while others wait at a barrier are an error. HISPARSE_CPU_STRICT, 0 or 1.
        item_copy: The item copy of AMD GPUs, "wave", or the one of NVIDIA GPUs, "chunk". HISPARSE_CPU_ITEM_COPY.
        shared_memory_bytes: Shared memory of a block. HISPARSE_CPU_SHARED_MEMORY_BYTES, 262144 where that is unset.
    """

    warp_size: int
    seed: int | None
    strict: bool
    item_copy: Literal["wave", "chunk"]
    shared_memory_bytes: int


_set: Options | None = None  # None: the environment decides


def _set_options(values: Options | None) -> None:
    global _set
    _C.set_cpu_options(None if values is None else astuple(values))
    _set = values


def get_options() -> Options:
    """The options that the next call on the CPU target will run with."""
    return Options(*_C.cpu_options())


@contextmanager
def options(
    warp_size: int | None = None,
    seed: int | None = None,
    strict: bool | None = None,
    item_copy: Literal["wave", "chunk"] | None = None,
    shared_memory_bytes: int | None = None,
) -> Iterator[Options]:
    """Runs the calls inside the ``with`` block with other options, process-wide; None leaves an option as it is.

    Args:
        warp_size: Threads of a warp, 32 or 64.
        seed: At least 0: threads run in a random order that it repeats.
        strict: Whether threads that leave before a barrier are an error.
        item_copy: "wave" or "chunk".
        shared_memory_bytes: Shared memory of a block, at least 0.

    Raises:
        ValueError: An option has a value that ``Options`` does not name.
    """
    given = {
        "warp_size": warp_size,
        "seed": seed,
        "strict": strict,
        "item_copy": item_copy,
        "shared_memory_bytes": shared_memory_bytes,
    }
    before = _set
    inside = replace(get_options(), **{name: value for name, value in given.items() if value is not None})
    _set_options(inside)
    try:
        yield inside
    finally:
        _set_options(before)
