"""Host memory that a GPU's kernels read: pools that are pinned from the start, and memory that is registered later."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _C

if TYPE_CHECKING:
    import torch

    from .swap_in import Tensor

_registered: dict[int, int] = {}  # where each registration starts and ends, in whole pages of the system


class HostRegistration:
    """Host memory that is registered with the driver, until :meth:`unregister`, the end of a ``with`` block, or the
    end of this object, which keeps the memory alive.

    Attributes:
        memory: The tensor or array.
        target: ``"cuda"`` or ``"rocm"``; None on a machine without a GPU, where nothing needs registering.
        pieces: Offset and bytes of each piece that the driver knows.
    """

    def __init__(self, memory: Tensor, page_bytes: int, chunk_bytes: int | None, device_index: int | None):
        self.memory: Tensor | None = memory
        self.target: str | None = None
        self.pieces: list[tuple[int, int]] = []
        self._start: int | None = None
        self._address, self._bytes = _C.host_memory(memory)
        if self._bytes == 0:
            raise ValueError("memory: expected at least one byte, got none")
        pieces = _cut(self._address, self._bytes, page_bytes, chunk_bytes)
        start, end = self._claim()
        _registered[start] = end
        self._start = start
        try:
            self._register(pieces, device_index)
        except BaseException:
            self._release()
            raise

    @property
    def is_registered(self) -> bool:
        return self._start is not None

    def _claim(self) -> tuple[int, int]:
        page = mmap.PAGESIZE
        start, end = self._address // page * page, -(-(self._address + self._bytes) // page) * page
        for other_start, other_end in _registered.items():
            if start < other_end and other_start < end:
                raise ValueError(
                    f"memory: expected memory that shares no page with what is registered, got {self._bytes} bytes at "
                    f"{self._address:#x}, beside a registration from {other_start:#x} to {other_end:#x}"
                )
        return start, end

    def _register(self, pieces: list[tuple[int, int]], device_index: int | None) -> None:
        self.target = _C.gpu_target()
        if self.target is None:
            self.pieces = pieces
            return
        self._device = _current_device() if device_index is None else device_index
        for offset, size in pieces:
            try:
                _C.register_host_memory(self.target, self._address + offset, size, self._device)
            except (RuntimeError, ValueError) as error:
                done = len(self.pieces)
                for earlier, _ in reversed(self.pieces):
                    with contextlib.suppress(RuntimeError):  # the error that led here says more
                        _C.unregister_host_memory(self.target, self._address + earlier, self._device)
                self.pieces = []
                earlier = f"; the {done} pieces before it are unregistered again" if done else ""
                raise type(error)(
                    f"memory: cannot register {size} bytes at {self._address + offset:#x}, "
                    f"offset {offset} of {self._bytes}: {error}{earlier}"
                ) from error
            self.pieces.append((offset, size))

    def unregister(self) -> None:
        """Takes the memory from the driver again. The GPU must be done with it. A second call does nothing.

        Raises:
            RuntimeError: The driver reports an error. All pieces have been tried, and the memory counts as
                unregistered.
        """
        if not self.is_registered:
            return
        pieces, self.pieces = self.pieces, []
        failure = None
        for offset, size in reversed(pieces if self.target is not None else []):
            try:
                _C.unregister_host_memory(self.target, self._address + offset, self._device)
            except RuntimeError as error:
                place = f"{size} bytes at {self._address + offset:#x}, offset {offset} of {self._bytes}"
                failure = failure or RuntimeError(f"memory: cannot unregister {place}: {error}")
        self._release()
        if failure is not None:
            raise failure

    def _release(self) -> None:
        start, self._start = self._start, None
        _registered.pop(start, None)
        self.memory = None

    def __enter__(self) -> HostRegistration:
        return self

    def __exit__(self, *_: Any) -> None:
        self.unregister()

    def __del__(self) -> None:
        # At the end of the process, and in a fork, the driver is beyond reach: it cleans up itself.
        if getattr(self, "_start", None) is not None and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):
                self.unregister()


def register_host_memory(
    memory: Tensor, *, page_bytes: int = 1, chunk_bytes: int | None = None, device_index: int | None = None
) -> HostRegistration:
    """Registers host memory with the GPU's driver, so that the kernels of every device reach it.

    For memory that exists already: a shared mapping, or a pool that another library owns. For a new pool see
    :func:`pin_host_pool`. In one piece, it equals
    ``torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 3)``.

    Args:
        memory: A contiguous tensor on the CPU, or an array.
        page_bytes: Bytes of a page of KV cache. No piece ends within a page, since a copy by the copy engine must not
            run from one piece into the next.
        chunk_bytes: The most bytes in one piece, where the driver refuses more at once; rounded down to whole pages
            of both the KV cache and the system. None registers all memory as one piece. More than one piece needs
            memory that starts on a page of the system.
        device_index: The device whose context does it; None for torch's current one, or 0.

    On a machine without a GPU it makes the same checks and registers nothing.

    Raises:
        TypeError: `memory` is no tensor, or a size no int.
        ValueError: `memory` is on a GPU, not contiguous, or registered already, in part or in a page that it shares;
            it is empty; a chunk has no room for a page; there is no such device.
        RuntimeError: The driver refuses a piece. The message has its address, offset and size; the pieces before it
            are unregistered again, the last one first.
    """
    return HostRegistration(memory, page_bytes, chunk_bytes, device_index)


def _cut(address: int, size: int, page_bytes: int, chunk_bytes: int | None) -> list[tuple[int, int]]:
    for name, value in {"page_bytes": page_bytes, "chunk_bytes": chunk_bytes}.items():
        if name == "chunk_bytes" and value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if chunk_bytes is None or chunk_bytes >= size:
        return [(0, size)]
    unit = math.lcm(page_bytes, mmap.PAGESIZE)
    chunk = chunk_bytes // unit * unit
    if chunk == 0:
        raise ValueError(
            f"chunk_bytes: expected room for whole pages of {page_bytes} bytes, and of {mmap.PAGESIZE} bytes of the "
            f"system, so at least {unit}, got {chunk_bytes}"
        )
    if address % mmap.PAGESIZE != 0:
        raise ValueError(
            f"memory: expected an address that {mmap.PAGESIZE} divides, to be registered in chunks, got {address:#x}"
        )
    return [(offset, min(chunk, size - offset)) for offset in range(0, size, chunk)]


def _current_device() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch.cuda, "current_device") and torch.cuda.is_available():
        return torch.cuda.current_device()
    return 0


class _RegisteredPages:
    """Pages of their own, which NumPy takes for an array; they go when the last tensor over them does."""

    def __init__(self, size: int, page_bytes: int, chunk_bytes: int | None, device_index: int | None):
        pages = np.frombuffer(mmap.mmap(-1, size), np.uint8, size)
        self.registration = register_host_memory(
            pages, page_bytes=page_bytes, chunk_bytes=chunk_bytes, device_index=device_index
        )
        self.__array_interface__ = pages.__array_interface__

    def __del__(self) -> None:
        registration = getattr(self, "registration", None)
        if registration is not None and not sys.is_finalizing():
            registration.__del__()


def pin_host_pool(
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    page_bytes: int = 1,
    chunk_bytes: int | None = None,
    device_index: int | None = None,
) -> torch.Tensor:
    """A zeroed pool in pinned host memory, such as `host_cache`: a torch tensor on the CPU that kernels reach.

    It equals ``torch.zeros(shape, dtype=dtype, pin_memory=True)``, but takes no more than its size rounded up to pages
    of the system, where torch's pinned allocator rounds up to a power of two, and goes back to the system with the last
    tensor over it, by when the GPU must be done with it.

    Args:
        shape: Of the tensor.
        dtype: Of the tensor; None for torch.uint8.
        page_bytes: Bytes of a page of KV cache, as for ``register_host_memory``.
        chunk_bytes: The most bytes registered at once, as there.
        device_index: The device whose context does it, as there.

    On a machine without a GPU the memory is the same, and nothing is registered.

    Raises:
        ValueError: A size is negative, or the pool has no room in 63 bits.
        MemoryError: The system has no such memory.
        RuntimeError: The driver refuses it.
    """
    import torch

    dtype = torch.uint8 if dtype is None else dtype
    shape = tuple(int(extent) for extent in shape)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape: expected sizes of at least 0, got {shape}")
    size = math.prod(shape) * dtype.itemsize
    if size >= 2**63:
        raise ValueError(f"shape: expected a pool that fits in memory, got {shape}")
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    try:
        pages = _RegisteredPages(size, page_bytes, chunk_bytes, device_index)
    except OSError as error:
        raise MemoryError(f"shape: no memory for {size} bytes: {error}") from error
    return torch.from_numpy(np.asarray(pages)).view(dtype).view(shape)
