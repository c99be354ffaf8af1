"""Where an op can run in these tests, and arrays with guard bytes around them to run it on."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence

import numpy as np

import hisparse

try:
    import torch
except ImportError:
    torch = None

GUARD_BYTES = 256
BASE_ALIGNMENT = 64
HOST_POOLS = ("host_cache", "host_cache_k", "host_cache_v", "src")  # in host memory where the op runs on a GPU


def has_gpu() -> bool:
    return torch is not None and torch.cuda.is_available()


class Guarded:
    """A row-strided array inside a buffer of random bytes: before it, behind it, and between its rows.

    The array starts `GUARD_BYTES + lead` bytes into the buffer, and every place puts the buffer at an address that
    BASE_ALIGNMENT divides, so `lead` is the misalignment of the array.
    """

    def __init__(self, raw: np.ndarray, dtype, shape: tuple[int, ...], strides: tuple[int, ...], lead: int):
        self.raw, self.dtype, self.shape, self.strides, self.lead = raw, np.dtype(dtype), shape, strides, lead
        self.start = GUARD_BYTES + lead
        self.view = np.ndarray(
            shape, self.dtype, buffer=raw, offset=self.start, strides=[n * self.dtype.itemsize for n in strides]
        )

    @classmethod
    def random(cls, rng: np.random.Generator, dtype, shape: Sequence[int], row_stride: int | None = None, lead=0):
        dtype, shape = np.dtype(dtype), tuple(int(n) for n in shape)
        strides = [1] * len(shape)
        for axis in reversed(range(len(shape) - 1)):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
        if row_stride is not None:
            strides[0] = int(row_stride)
        raw = np.frombuffer(rng.bytes(2 * GUARD_BYTES + lead + cls._span(dtype, shape, strides)), np.uint8).copy()
        return cls(raw, dtype, shape, tuple(strides), lead)

    @classmethod
    def of(cls, rng: np.random.Generator, values, dtype=None, lead: int = 0, gap: int = 0):
        """`values` with guards; `gap` elements between rows."""
        values = np.asarray(values, dtype)
        row_stride = values.shape[1] + gap if values.ndim == 2 else None
        array = cls.random(rng, values.dtype, values.shape, row_stride, lead)
        array.view[...] = values
        return array

    @staticmethod
    def _span(dtype: np.dtype, shape, strides) -> int:
        if 0 in shape:
            return 0
        return dtype.itemsize * (1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))

    @property
    def span(self) -> int:
        return self._span(self.dtype, self.shape, self.strides)

    def with_raw(self, raw: np.ndarray) -> Guarded:
        return Guarded(raw, self.dtype, self.shape, self.strides, self.lead)

    def copy(self) -> Guarded:
        return self.with_raw(self.raw.copy())

    def on_torch(self, raw) -> torch.Tensor:
        """The same array as a tensor over `raw`, a uint8 tensor with the bytes of the buffer."""
        flat = raw[self.start : self.start + self.span].view(getattr(torch, self.dtype.name))
        return flat.as_strided(self.shape, self.strides)


def aligned_bytes(count: int) -> np.ndarray:
    buffer = np.empty(count + BASE_ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % BASE_ALIGNMENT
    return buffer[start : start + count]


def between_unreadable_pages() -> np.ndarray:
    """Two pages of memory; an access to the page before or behind them ends the process."""
    page, no_access = mmap.PAGESIZE, 0
    memory = mmap.mmap(-1, 4 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for outside in (address, address + 3 * page):
        assert libc.mprotect(outside, page, no_access) == 0
    return np.frombuffer(memory, np.uint8, 2 * page, page)


def mapped_tensor(size: int, file: int = -1) -> tuple[torch.Tensor, int]:
    """Pageable memory of its own, or of a file that other processes map too: bytes, and where they are."""
    memory = mmap.mmap(file, size)
    return torch.frombuffer(memory, dtype=torch.uint8), ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Registered:
    """Registers memory with the current device for a while."""

    def __init__(self, address: int, size: int):
        self.address, self.size = address, size

    def __enter__(self):
        assert int(torch.cuda.cudart().cudaHostRegister(self.address, self.size, 0)) == 0

    def __exit__(self, *_):
        torch.cuda.synchronize()
        assert int(torch.cuda.cudart().cudaHostUnregister(self.address)) == 0


class CpuPlace:
    """The CPU target in strict mode, with another random schedule at each call."""

    def __init__(self, warp_size: int, item_copy: str, library: str):
        self.warp_size, self.item_copy, self.library = warp_size, item_copy, library
        self.seeds = itertools.count(1)

    def put(self, name: str, array: Guarded):
        """(what `fetch` needs, the array to call an op with)"""
        raw = aligned_bytes(len(array.raw))
        raw[:] = array.raw
        if self.library == "torch":
            return raw, array.on_torch(torch.from_numpy(raw))
        return raw, array.with_raw(raw).view

    def fetch(self, raw) -> np.ndarray:
        return raw

    @contextlib.contextmanager
    def options(self) -> Iterator[None]:
        with hisparse.cpu.options(
            warp_size=self.warp_size, item_copy=self.item_copy, seed=next(self.seeds), strict=True
        ):
            yield


class GpuPlace:
    """A CUDA or ROCm device, with pools of host memory pinned."""

    library = "torch"
    warp_size = None

    def __init__(self, index: int = 0):
        self.device = torch.device("cuda", index)

    def put(self, name: str, array: Guarded):
        raw = torch.from_numpy(array.raw)
        raw = raw.pin_memory() if name in HOST_POOLS else raw.to(self.device)
        return raw, array.on_torch(raw)

    def fetch(self, raw) -> np.ndarray:
        torch.cuda.synchronize(self.device)
        return raw.cpu().numpy().copy()

    def options(self):
        return contextlib.nullcontext()


class RegisteredPlace(GpuPlace):
    """A GPU whose host pools lie one after the other in memory that the caller has registered."""

    def __init__(self, index: int, memory: torch.Tensor):
        super().__init__(index)
        self.memory, self.used = memory, 0

    def put(self, name: str, array: Guarded):
        if name not in HOST_POOLS:
            return super().put(name, array)
        raw = self.memory[self.used : self.used + len(array.raw)]
        assert len(raw) == len(array.raw), "the memory is too small"
        self.used += -(-len(raw) // BASE_ALIGNMENT) * BASE_ALIGNMENT
        raw.copy_(torch.from_numpy(array.raw))
        return raw, array.on_torch(raw)


CPU_PLACES = {
    f"cpu{warp_size}-{item_copy}-{library}": (warp_size, item_copy, library)
    for warp_size, item_copy, library in itertools.product((64, 32), ("wave", "chunk"), ("numpy", "torch"))
}


def make_place(name: str) -> CpuPlace | GpuPlace:
    return GpuPlace() if name == "gpu" else CpuPlace(*CPU_PLACES[name])


def call(
    place, function: Callable, arrays: dict[str, Guarded], prepare: Callable | None = None, **others
) -> dict[str, Guarded]:
    """Copies the arrays to the place, calls the op there, and returns the arrays as the call left them.

    `prepare` may replace the arrays of the call, a dict by argument name, with other views of the same memory.
    """
    raws, views = {}, {}
    for name, array in arrays.items():
        raws[name], views[name] = place.put(name, array)
    if prepare is not None:
        views = prepare(views)
    with place.options():
        assert function(**views, **others) is None
    return {name: array.with_raw(place.fetch(raws[name])) for name, array in arrays.items()}


def assert_same(actual: dict[str, Guarded], expected: dict[str, Guarded]) -> None:
    """Every byte of every buffer, guards and gaps included."""
    for name, want in expected.items():
        got = actual[name]
        if np.array_equal(got.raw, want.raw):
            continue
        places = np.argwhere(_bits(got.view) != _bits(want.view))
        if len(places):
            at = tuple(places[0].tolist())
            raise AssertionError(
                f"{name}: {len(places)} of {want.view.size} elements differ, "
                f"the first at {list(at)}: got {got.view[at]}, expected {want.view[at]}"
            )
        stray = np.flatnonzero(got.raw != want.raw) - want.start
        raise AssertionError(
            f"{name}: {len(stray)} bytes outside the array changed, the first {stray[0]} bytes from its start, "
            f"which spans {want.span} bytes"
        )


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "f" else array


def assert_takes_no_device_memory(work: Callable[[], object], calls: int = 2000) -> None:
    """Free memory is the GPU's, which others may use meanwhile: one of several tries has to leave it as it was."""

    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    work()
    for _ in range(20):
        before = free()
        for _ in range(calls):
            work()
        if free() == before:
            return
    raise AssertionError(f"{calls} calls took {before - free()} bytes")
