"""A call of every operator of torch.ops.hisparse, on tensors of a place, and all memory that it may touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvcacheio_cases
import numpy as np
import swap_in_cases
from places import Guarded

import hisparse
from hisparse import kvcacheio


class Sample:
    """`arguments` for `function`, and `fetch()`, the bytes of all tensors by name, guards included."""

    def __init__(self, place, function: Callable[..., Any], arrays: dict[str, Any], options: dict[str, Any]):
        self.place, self.function, self.raws = place, function, {}
        self.arguments = {name: self._put(name, array) for name, array in arrays.items()} | options

    def _put(self, name: str, array):
        if isinstance(array, list):
            return [self._put(f"{name}[{n}]", part) for n, part in enumerate(array)]
        self.raws[name], view = self.place.put(name.partition("[")[0], array)
        return view

    def call(self, function: Callable[..., Any]) -> Any:
        with self.place.options():
            return function(**self.arguments)

    def fetch(self) -> dict[str, bytes]:
        return {name: self.place.fetch(raw).tobytes() for name, raw in self.raws.items()}


def _swap_in_case(rng, **others) -> swap_in_cases.SwapInCase:
    rows = [swap_in_cases.random_row(rng, length, 8, 16) for length in (60, 45, 9)]
    return swap_in_cases.make_case(
        rng, rows, num_top_k=8, hot_buffer_size=16, num_real_reqs=3, stale_host_locs=False, **others
    )


def _swap_in(rng, place) -> Sample:
    case = _swap_in_case(rng)
    return Sample(place, hisparse.load_cache_to_device_buffer_mla, case.arrays, case.sizes)


def _copy_items(rng, place) -> Sample:
    arrays = {
        "src": Guarded.random(rng, np.uint8, (9, 24)),
        "dst": Guarded.random(rng, np.uint8, (9, 24)),
        "src_indices": Guarded.of(rng, [3, -1, 8, 2], np.int64),
        "dst_indices": Guarded.of(rng, [0, 4, 5, 1], np.int64),
    }
    return Sample(place, hisparse.copy_items, arrays, {"item_size_bytes": 24, "blocks": 2})


def _transfer(name: str):
    def make(rng, place) -> Sample:
        shape = kvcacheio_cases.Shape(page_size=2, head_num=2, padding=48)
        placed = kvcacheio_cases.Placed(rng, place, kvcacheio_cases.make_case(rng, name, shape))
        sample = Sample(place, getattr(kvcacheio, name), {}, {**placed.views, **placed.case.sizes, "block_quota": 3})
        sample.raws = placed.raws
        return sample

    return make


def _pages(name: str):
    def make(rng, place) -> Sample:
        layers = [Guarded.random(rng, np.uint8, (12, 40)) for _ in range(2)]
        others = [Guarded.random(rng, np.uint8, (3, 2, 4, 40))]
        if name == "transfer_kv_direct":
            others = [Guarded.random(rng, np.uint8, (12, 40)) for _ in range(2)]
        src, dst = (others, layers) if name.endswith("pf_lf") else (layers, others)
        ends = ("src_layers", "dst_layers") if name == "transfer_kv_direct" else ("src_ptrs", "dst_ptrs")
        arrays = dict(zip(ends, (src, dst), strict=True))
        arrays["src_indices"] = Guarded.of(rng, [8, 9, 10, 11, 0, 1, 2, 3], np.int64)
        arrays["dst_indices"] = Guarded.of(rng, [4, 5, 6, 7, 8, 9, 10, 11], np.int64)
        layer = {"layer_id": 0} if name.endswith("direct_pf_lf") else {}
        return Sample(place, getattr(kvcacheio, name), arrays, {"page_size": 4} | layer)

    return make


def _embedding_ranges(rng, place) -> Sample:
    arrays = {name: Guarded.random(rng, np.uint8, (10, 16)) for name in ("src", "dst")}
    ranges = {"src_starts": [0, 7], "dst_starts": [5, 0], "lengths": [4, 2]}
    return Sample(place, kvcacheio.transfer_embedding_ranges_direct, arrays, ranges)


def _layer_copy(rng, place) -> Sample:
    sample = Sample(place, kvcacheio.copy_all_layer_kv_cache_cpu, {}, {})
    layers = [sample._put(f"layer[{n}]", Guarded.random(rng, np.uint8, (6, 16 + n))) for n in range(2)]
    tables = {
        "data_ptrs": Guarded.of(rng, [layer.data_ptr() for layer in layers], np.uint64),
        "strides": Guarded.of(rng, [16, 17], np.int64),
        "tgt_loc": Guarded.of(rng, [1, 0, -1], np.int64),
        "src_loc": Guarded.of(rng, [0, 4, 2], np.int64),
    }
    sample.arguments = {name: sample._put(name, table) for name, table in tables.items()}
    return sample


PAGE_BYTES = 37_440  # of 64 DeepSeek-V4 tokens


def _swap_in_pages(rng, place) -> Sample:
    sample = _swap_in_case(rng, item_size_bytes=584)
    for pool in ("host_cache", "device_buffer"):
        sample.arrays[pool] = Guarded.random(rng, np.uint8, (-(-len(sample[pool]) // 64), PAGE_BYTES))
    return Sample(place, hisparse.load_cache_to_device_buffer_dsv4_mla, sample.arrays, sample.sizes)


def _swap_in_blocks(rng, place) -> Sample:
    case = _swap_in_case(rng, plan=False)
    arrays, sizes = dict(case.arrays), dict(case.sizes)
    arrays["top_k_blocks"] = Guarded.of(rng, rng.permutation(14)[:6].reshape(3, 2), np.int32)
    for pool in ("host_cache", "device_buffer"):
        arrays[f"{pool}_k"] = arrays.pop(pool)
        arrays[f"{pool}_v"] = Guarded.random(rng, np.uint8, arrays[f"{pool}_k"].shape)
    del arrays["top_k_tokens"], sizes["num_top_k"]
    return Sample(place, hisparse.load_blocks_to_device_buffer_mha, arrays, {**sizes, "sparse_block_size": 4})


def _planned_copy(rng, place) -> Sample:
    arrays = {
        "miss_src": Guarded.of(rng, rng.permutation(12).reshape(2, 6), np.int64),
        "miss_dst": Guarded.of(rng, rng.permutation(12).reshape(2, 6), np.int32),
        "miss_count": Guarded.of(rng, [3, 5], np.int32),
        "num_real_reqs": Guarded.of(rng, [2], np.int32),
        "host_cache": Guarded.random(rng, np.uint8, (12, 20)),
        "device_buffer": Guarded.random(rng, np.uint8, (12, 20)),
    }
    return Sample(place, hisparse.copy_cache_planned_mla, arrays, {"item_size_bytes": 20, "num_blocks": 2})


def _page_transfer(rng, place) -> Sample:
    sample = Sample(place, hisparse.transfer_cache_dsv4_mla, {}, {})
    arrays = {
        "src_indices": Guarded.of(rng, [3, -1, 70, 127], np.int64),
        "dst_indices": Guarded.of(rng, [64, 5, 0, 1], np.int64),
    }
    for side in ("src", "dst"):
        pools = [sample._put(f"{side}[{n}]", Guarded.random(rng, np.uint8, (2, PAGE_BYTES))) for n in range(2)]
        addresses = [kvcacheio_cases.address_of(pool, place) for pool in pools]
        arrays[f"{side}_ptrs"] = Guarded.of(rng, addresses, np.uint64)
    sample.arguments = {name: sample._put(name, array) for name, array in arrays.items()}
    return sample


def _translation(rng, place) -> Sample:
    arrays = {
        "mapping": Guarded.of(rng, rng.permutation(9), np.int64),
        "locations": Guarded.of(rng, [4, -1, 0, 8, -7], np.int32),
    }
    return Sample(place, hisparse.translate_padded_hisparse_locations, arrays, {})


DIRECT_OPS = ("transfer_kv_direct", "transfer_kv_per_layer_direct_pf_lf", "transfer_kv_all_layer_direct_lf_pf")
MAKERS: dict[str, Callable[[np.random.Generator, Any], Sample]] = {
    "load_cache_to_device_buffer_mla": _swap_in,
    "load_cache_to_device_buffer_dsv4_mla": _swap_in_pages,
    "load_blocks_to_device_buffer_mha": _swap_in_blocks,
    "copy_cache_planned_mla": _planned_copy,
    "transfer_cache_dsv4_mla": _page_transfer,
    "translate_padded_hisparse_locations": _translation,
    "copy_items": _copy_items,
    **{name: _transfer(name) for name in kvcacheio_cases.OPS},
    **{name: _pages(name) for name in DIRECT_OPS},
    "transfer_embedding_ranges_direct": _embedding_ranges,
    "copy_all_layer_kv_cache_cpu": _layer_copy,
}
# Where a table of addresses stands for what is written.
BY_TABLE = (
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_mla",
    "transfer_cache_dsv4_mla",
    "copy_all_layer_kv_cache_cpu",
)


def make_sample(name: str, place, seed: int = 5) -> Sample:
    """The same bytes at every call, in memory of its own."""
    return MAKERS[name](np.random.default_rng(seed), place)
