"""A right call of every public op, by name: what tests of wrong arguments start from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import test_errors
import test_kvcacheio_errors

import hisparse
from hisparse import kvcacheio

NO_OPS = {"build_info"}
# They launch nothing; what they refuse is in the tests named after their modules.
HELPERS = {"checking", "pin_host_pool", "register_host_memory", "reset_request_state"}
PAGE_BYTES = 37_440  # of DeepSeek-V4: 64 tokens


def public_ops() -> dict[str, Callable]:
    """Every op, from the modules themselves."""
    found = {name: getattr(hisparse, name) for name in hisparse.__all__ if name not in NO_OPS | HELPERS}
    found |= vars(kvcacheio)
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


class Arguments(dict):
    """Arguments by name, and all arrays that the call could change: those that tables of addresses name, too."""

    pools: list[np.ndarray]


def _with_pools(arguments: dict[str, Any], pools: list[np.ndarray] | None = None) -> Arguments:
    call = Arguments(arguments)
    call.pools = [value for value in arguments.values() if isinstance(value, np.ndarray)] + (pools or [])
    return call


RIGHT_CALLS: dict[str, Callable[[], Arguments]] = {
    function.__name__: lambda make=test_errors.ARGUMENTS[name]: _with_pools(make())
    for name, function in test_errors.OPS.items()
}


def _pages(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, PAGE_BYTES), np.uint8)


def _swap_in_of_pages() -> Arguments:
    # 160 tokens on the host, 50 slots on the device.
    pages = {"host_cache": _pages(3), "device_buffer": _pages(1)}
    return _with_pools(test_errors.swap_in_arguments() | pages | {"item_size_bytes": 584})


def _swap_in_of_blocks() -> Arguments:
    arguments = test_errors.swap_in_arguments()
    tokens = arguments.pop("top_k_tokens")
    arguments |= {"top_k_blocks": tokens[:, :2] // 2, "sparse_block_size": 2}
    for pool in ("host_cache", "device_buffer"):
        keys = arguments.pop(pool)
        arguments |= {f"{pool}_k": keys, f"{pool}_v": keys.copy()}
    for name in ("num_top_k", "miss_src", "miss_dst", "miss_count"):
        del arguments[name]
    return _with_pools(arguments)


def _planned_copy() -> Arguments:
    rng = np.random.default_rng(3)
    return _with_pools(
        {
            "miss_src": rng.integers(0, 20, (3, 4)),
            "miss_dst": rng.permutation(12).astype(np.int32).reshape(3, 4),
            "miss_count": np.array([1, 4, 2], np.int32),
            "num_real_reqs": np.array([3], np.int32),
            "host_cache": rng.integers(0, 256, (20, 16), np.uint8),
            "device_buffer": rng.integers(0, 256, (20, 16), np.uint8),
            "item_size_bytes": 16,
            "num_blocks": 2,
            "block_size": 64,
            "is_dsv4_layout": False,
            "skip_io": False,
        }
    )


def _transfer_of_pages() -> Arguments:
    layers = [_pages(1) for _ in range(4)]
    addresses = np.array([layer.ctypes.data for layer in layers], np.uint64)
    indices = {"src_indices": np.arange(6), "dst_indices": np.arange(6)[::-1].copy()}
    return _with_pools({"src_ptrs": addresses[:2], "dst_ptrs": addresses[2:], **indices, "block_size": 64}, layers)


RIGHT_CALLS |= {
    "load_cache_to_device_buffer_dsv4_mla": _swap_in_of_pages,
    "load_blocks_to_device_buffer_mha": _swap_in_of_blocks,
    "copy_cache_planned_mla": _planned_copy,
    "transfer_cache_dsv4_mla": _transfer_of_pages,
}
RIGHT_CALLS["translate_padded_hisparse_locations"] = lambda: _with_pools(
    {"mapping": np.arange(20), "locations": np.array([3, -1, 19, 0], np.int32)}
)
RIGHT_CALLS |= {op: lambda op=op: _with_pools(*test_kvcacheio_errors.valid(op)) for op in test_kvcacheio_errors.ALL_OPS}
