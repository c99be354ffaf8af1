"""The few array operations that differ between NumPy, for the CPU target without torch, and torch."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np

from .host_memory import pin_host_pool

Array = Any  # numpy.ndarray or torch.Tensor, whichever the arrays below make


class PendingCopy:
    """A copy in host memory, whose values count once it is done."""

    def __init__(self, values: np.ndarray, event: Any = None) -> None:
        self.values, self._event = values, event

    def is_done(self) -> bool:
        return self._event is None or self._event.query()


class TimeMark:
    """A point of time: a GPU's event, or else the clock."""

    def __init__(self, event: Any = None) -> None:
        self._event, self._at = event, time.perf_counter()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def seconds_since(self, start: TimeMark) -> float:
        return self._at - start._at if self._event is None else start._event.elapsed_time(self._event) / 1e3


class Arrays(Protocol):
    device: str

    def full(self, shape: tuple[int, ...], value: int, dtype: str) -> Array:
        """In device memory."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """In device memory, of any values."""

    def arange(self, count: int) -> Array:
        """int64 [count] in device memory."""

    def on_device(self, values: np.ndarray) -> Array:
        """A copy in device memory."""

    def on_host(self, values: np.ndarray) -> Array:
        """A copy in host memory that the device can read and write."""

    def upload(self, values: np.ndarray, out: Array) -> None:
        """Copies values to an array in device memory, in the order of the stream, without waiting for it."""

    def pinned_bytes(self, count: int) -> Array:
        """uint8 [count] of host memory that the device can read and write."""

    def item_bytes(self, items: Array, item_size_bytes: int) -> Array:
        """uint8 [count, item_size_bytes]: the bytes of items, contiguous and on the device."""

    def accessible_ptr(self, array: Array) -> int:
        """The address by which the device reaches an array."""

    def as_type(self, array: Array, dtype: str) -> Array: ...

    def concatenate(self, parts: list[Array]) -> Array:
        """Along the last dimension."""

    def on_cpu(self, array: Array) -> Array:
        """The array, or a copy of it in host memory."""

    def start_copy(self, array: Array) -> PendingCopy:
        """Starts a copy to host memory that nobody waits for."""

    def time_mark(self) -> TimeMark:
        """A point of time in the current stream's work."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """A copy of the values, after everything that was launched before has run."""

    def gather(self, pool: Array, locs: np.ndarray, out: Array) -> Array:
        """Copies rows `locs` of a pool to `out`, in that order."""

    def exp(self, array: Array) -> Array: ...

    def same_bytes(self, left: Array, right: Array) -> bool: ...

    def synchronize(self) -> None: ...

    def finish(self) -> None:
        """Waits for all work of the device, unless a graph is being captured."""

    def is_capturing(self) -> bool:
        """Whether a graph is being captured on the current stream."""


class NumpyArrays:
    """NumPy arrays, for the CPU target. Host memory and device memory are the same."""

    device = "cpu"

    def full(self, shape: tuple[int, ...], value: int, dtype: str) -> np.ndarray:
        return np.full(shape, value, dtype)

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.empty(shape, dtype)

    def arange(self, count: int) -> np.ndarray:
        return np.arange(count)

    def on_device(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    on_host = on_device

    def upload(self, values: np.ndarray, out: np.ndarray) -> None:
        out[...] = values

    def pinned_bytes(self, count: int) -> np.ndarray:
        return np.empty(count, np.uint8)

    def item_bytes(self, items: np.ndarray, item_size_bytes: int) -> np.ndarray:
        return np.ascontiguousarray(items).view(np.uint8).reshape(-1, item_size_bytes)

    def accessible_ptr(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def as_type(self, array: np.ndarray, dtype: str) -> np.ndarray:
        return array.astype(dtype, copy=False)

    def concatenate(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=-1)

    def on_cpu(self, array: np.ndarray) -> np.ndarray:
        return array

    def start_copy(self, array: np.ndarray) -> PendingCopy:
        return PendingCopy(array.copy())

    def time_mark(self) -> TimeMark:
        return TimeMark()

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def gather(self, pool: np.ndarray, locs: np.ndarray, out: np.ndarray) -> np.ndarray:
        return np.take(pool, locs, axis=0, out=out, mode="clip")

    def exp(self, array: np.ndarray) -> np.ndarray:
        return np.exp(array)

    def same_bytes(self, left: np.ndarray, right: np.ndarray) -> bool:
        return np.array_equal(left.view(np.int32), right.view(np.int32))

    def synchronize(self) -> None:
        pass

    finish = synchronize

    def is_capturing(self) -> bool:
        return False


class TorchArrays:
    """torch tensors: on a GPU, CUDA or ROCm, with pinned host memory, or on the CPU."""

    def __init__(self, device: Any = "cuda") -> None:
        try:
            import torch
        except ImportError as error:
            raise RuntimeError(f"device {device} needs torch, which is not installed") from error
        self._torch, self._device = torch, torch.device(device)
        self._is_gpu = self._device.type == "cuda"
        if self._is_gpu and not torch.cuda.is_available():
            raise RuntimeError(f"device {device} needs a GPU, and torch finds none")
        if self._is_gpu and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self.device = str(self._device)

    def full(self, shape: tuple[int, ...], value: int, dtype: str) -> Array:
        return self._torch.full(shape, value, dtype=getattr(self._torch, dtype), device=self._device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device)

    def arange(self, count: int) -> Array:
        return self._torch.arange(count, device=self._device)

    def on_device(self, values: np.ndarray) -> Array:
        return self._torch.tensor(values, device=self._device)

    def on_host(self, values: np.ndarray) -> Array:
        host = self._torch.tensor(values)
        return host.pin_memory() if self._is_gpu else host

    def upload(self, values: np.ndarray, out: Array) -> None:
        # torch gives the pinned memory to nobody else before the copy has run.
        out.copy_(self.on_host(values), non_blocking=True)

    def pinned_bytes(self, count: int) -> Array:
        if not self._is_gpu:
            return self._torch.empty(count, dtype=self._torch.uint8)
        return pin_host_pool((count,), device_index=self._device.index)

    def item_bytes(self, items: Array, item_size_bytes: int) -> Array:
        flat = self._torch.as_tensor(items).detach().to(self._device).contiguous().view(-1).view(self._torch.uint8)
        return flat.view(-1, item_size_bytes)

    def accessible_ptr(self, array: Array) -> int:
        from . import kvcacheio

        return kvcacheio.get_device_accessible_ptr(array, self._device.index or 0)

    def as_type(self, array: Array, dtype: str) -> Array:
        return array.to(getattr(self._torch, dtype))

    def concatenate(self, parts: list[Array]) -> Array:
        return self._torch.cat(parts, dim=-1)

    def on_cpu(self, array: Array) -> Array:
        return array.cpu()

    def start_copy(self, array: Array) -> PendingCopy:
        if not self._is_gpu:
            return PendingCopy(array.numpy().copy())
        values = self._torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
        values.copy_(array, non_blocking=True)
        return PendingCopy(values.numpy(), self._record(self._torch.cuda.Event()))

    def time_mark(self) -> TimeMark:
        return TimeMark(self._record(self._torch.cuda.Event(enable_timing=True))) if self._is_gpu else TimeMark()

    def _record(self, event: Any) -> Any:
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def to_numpy(self, array: Array) -> np.ndarray:
        self.synchronize()
        return array.cpu().numpy().copy()

    def gather(self, pool: Array, locs: np.ndarray, out: Array) -> Array:
        return self._torch.index_select(pool, 0, self.on_device(locs.astype(np.int64)), out=out)

    def exp(self, array: Array) -> Array:
        return self._torch.exp(array)

    def same_bytes(self, left: Array, right: Array) -> bool:
        return self._torch.equal(left.view(self._torch.int32), right.view(self._torch.int32))

    def synchronize(self) -> None:
        """Waits for the current stream."""
        if self._is_gpu:
            self._torch.cuda.current_stream(self._device).synchronize()

    def finish(self) -> None:
        if self._is_gpu and not self.is_capturing():
            self._torch.cuda.synchronize(self._device)

    def is_capturing(self) -> bool:
        return self._is_gpu and self._torch.cuda.is_current_stream_capturing()


def arrays_for(device: Any) -> Arrays:
    """None is a GPU where torch finds one, else the CPU, with torch where it is installed; "numpy" is without torch."""
    if device is None:
        try:
            import torch
        except ImportError:
            return NumpyArrays()
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return NumpyArrays() if device == "numpy" else TorchArrays(device)
