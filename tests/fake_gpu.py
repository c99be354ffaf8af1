"""A machine with GPUs for a Python process that has none: torch's tensors and a driver that only keep the books.

For a process of its own: `install` puts a module named torch in place. Tensors live in host memory, and say what they
are through the attributes that every torch has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types

import numpy as np

import hisparse

KIND = os.environ["FAKE_KIND"]  # "cuda" or "hip"
DEVICE = {"cuda": "cuda", "hip": "rocm"}[KIND]
LIBRARY = os.environ[f"HISPARSE_{KIND.upper()}_LIBRARY"]
HOST_LOC_STEP = 1 << 40  # what the fake driver adds to host addresses


class Tensor:
    """A NumPy array that says it is a torch tensor on a device."""

    def __init__(self, array, device: str = "cuda", index: int | None = 0):
        self.array = np.asarray(array)
        self.device = types.SimpleNamespace(type=device, index=index if device == "cuda" else None)
        self.dtype = f"torch.{self.array.dtype.name}"
        self.shape = self.array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def new_empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return Tensor(np.empty(shape, dtype.removeprefix("torch.")), self.device.type, self.device.index)

    def copy_(self, other: Tensor) -> None:
        self.array[...] = other.array

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg


class Stream:
    """The current stream of each device."""

    handles: dict[int, int] = {}

    def __init__(self, index: int):
        self.cuda_stream = self.handles.get(index, 0)


def install() -> None:
    torch = types.ModuleType("torch")
    torch.Tensor = Tensor
    torch.version = types.SimpleNamespace(hip="7.1" if KIND == "hip" else None)
    torch.cuda = types.SimpleNamespace(current_stream=Stream)
    sys.modules["torch"] = torch


class Launch(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_uint),
        ("parts", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    ]


class Driver:
    """The fake driver's books."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        for name in ("fake_last_launch", "fake_last_launch_on"):
            getattr(self.library, name).restype = ctypes.POINTER(Launch)
        self.library.fake_arrivals.restype = ctypes.POINTER(ctypes.c_uint32)
        self.library.fake_kernel.restype = ctypes.c_char_p
        sizes = ("host_cache", "host_values", "planned_host_cache", "transfer_src", "transfer_dst")
        for name in (*sizes, "copied", "largest_batch", "registered", "unregistered"):
            getattr(self.library, f"fake_{name}").restype = ctypes.c_size_t

    def name(self, cuda: str, hip: str) -> bytes:
        return (cuda if KIND == "cuda" else hip).encode()

    def fail(self, cuda: str, hip: str, code: int) -> None:
        self.library.fake_fail(self.name(cuda, hip), code)

    def count(self, cuda: str, hip: str) -> int:
        return self.library.fake_count(self.name(cuda, hip))

    def fail_on(self, device: int, cuda: str, hip: str, code: int) -> None:
        self.library.fake_fail_on(self.name(cuda, hip), code, device)

    def count_on(self, device: int, cuda: str, hip: str) -> int:
        """Calls of a function while a device was current."""
        return self.library.fake_count_on(self.name(cuda, hip), device)

    def map_on(self, device: int, array: np.ndarray, shift: int) -> None:
        address = array.ctypes.data
        self.library.fake_map_on(*map(ctypes.c_size_t, (address, address + shift, array.nbytes)), device)

    def map(self, array: np.ndarray, first: int = 0, last: int | None = None, shift: int = HOST_LOC_STEP) -> None:
        """Bytes first .. last - 1 of an array as one piece of registered memory, `shift` away on the device."""
        last = array.nbytes if last is None else last
        address = array.ctypes.data + first
        self.library.fake_map(*map(ctypes.c_size_t, (address, address + shift, last - first)))

    @property
    def launch(self) -> Launch:
        return self.library.fake_last_launch().contents

    def launch_on(self, device: int) -> Launch:
        return self.library.fake_last_launch_on(device).contents

    @property
    def kernel(self) -> str:
        return self.library.fake_kernel().decode()

    @property
    def launches(self) -> int:
        return self.count("cuLaunchKernel", "hipModuleLaunchKernel")

    @property
    def single_copies(self) -> int:
        return self.count("cuMemcpyAsync", "hipMemcpyAsync")

    @property
    def batches(self) -> int:
        names = (b"cuMemcpyBatchAsync", b"cuMemcpyBatchAsync_v2", b"hipMemcpyBatchAsync")
        return sum(map(self.library.fake_count, names))

    @property
    def arrivals(self) -> int:
        return ctypes.cast(self.library.fake_arrivals(), ctypes.c_void_p).value or 0


def swap_in_arguments(batch: int = 2, top_k: int = 4, hot: int = 8, item: int = 16, requests: int = 4) -> dict:
    """NumPy arrays for a valid call."""
    return {
        "top_k_tokens": np.zeros((batch, top_k), np.int32),
        "device_buffer_tokens": np.full((requests, hot + 1), -1, np.int32),
        "host_cache_locs": np.zeros((requests, 32), np.int64),
        "device_buffer_locs": np.zeros((requests, hot + 1), np.int32),
        "host_cache": np.zeros((64, item), np.uint8),
        "device_buffer": np.zeros((64, item), np.uint8),
        "top_k_device_locs": np.zeros((batch, top_k), np.int32),
        "req_pool_indices": np.zeros(batch, np.int64),
        "seq_lens": np.full(batch, 20, np.int32),
        "lru_slots": np.tile(np.arange(hot, dtype=np.int16), (requests, 1)),
        "item_size_bytes": item,
        "num_top_k": top_k,
        "hot_buffer_size": hot,
    }


def on_device(arguments: dict, index: int = 0) -> dict:
    """The same call on a GPU, with host_cache in host memory."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    return arguments | {
        name: Tensor(value, "cpu" if name == "host_cache" else "cuda", index) for name, value in arrays.items()
    }


class Call:
    """A valid call, ready to be made again and again."""

    def __init__(self, driver: Driver, index: int = 0, mapped: bool = True, **sizes: int):
        self.arrays = swap_in_arguments(**sizes)
        self.arguments = on_device(self.arrays, index)
        if mapped:
            driver.map(self.arrays["host_cache"])

    def __call__(self, **others) -> None:
        hisparse.load_cache_to_device_buffer_mla(**{**self.arguments, **others})


class Place:
    """A fake GPU as a place for the cases of placed_calls.py: only what the driver copies is ever changed."""

    library = "torch"

    def __init__(self, driver: Driver, index: int = 0):
        self.driver, self.device = driver, types.SimpleNamespace(index=index)

    def put(self, name: str, array):
        raw = array.raw.copy()
        view = array.with_raw(raw).view
        if name != "host_cache":
            return raw, Tensor(view, "cuda", self.device.index)
        self.driver.map(raw)
        return raw, Tensor(view, "cpu")

    def fetch(self, raw: np.ndarray) -> np.ndarray:
        return raw

    def options(self):
        return contextlib.nullcontext()


def error_of(kind: type[Exception], call, *arguments, **others) -> str:
    """The message of the error that a call raises."""
    try:
        call(*arguments, **others)
    except Exception as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


install()
