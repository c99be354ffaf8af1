"""One call of every op with its arrays on a device, to be made again and again and compared with the reference.

`PLACED_CALLS` says how each is made: a function of a random generator, a place and the sides of the pools. Tests of
devices, threads and processes take the ops from there, so an op that is added there is in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import kvcacheio_reference
import numpy as np
import reference
from direct_cases import DIRECT_OPS, DirectCase
from family_cases import (
    ITEM_BYTES,
    block_case,
    copy_planned,
    dsv4_case,
    expect_blocks,
    expect_dsv4,
    get_token,
    put_token,
    random_block_row,
    random_pages,
)
from kvcacheio_cases import DIRECTIONS, HEAD_OPS, OPS, Placed, Shape, address_of, make_case
from kvcacheio_cases import expect as expect_transfer
from places import HOST_POOLS, Guarded, assert_same, torch
from swap_in_cases import expect, random_row, without_stale_plan
from swap_in_cases import make_case as make_swap_in_case

import hisparse
import hisparse.kvcacheio as kvcacheio

Arrays = dict[str, Guarded]


@dataclass
class PlacedCall:
    function: Callable[..., None]
    arguments: dict[str, Any]
    place: Any
    raws: dict[str, Any]  # the memory of each array
    before: Arrays
    after: Arrays
    specified: Callable[[Arrays], Arrays] = lambda arrays: arrays  # without what the op leaves unspecified
    kept_alive: Any = None  # memory that the arguments name by address only

    def launch(self) -> None:
        with self.place.options():
            assert self.function(**self.arguments) is None

    def reset(self) -> None:
        for name, raw in self.raws.items():
            raw.copy_(torch.from_numpy(self.before[name].raw))

    def fetch(self) -> Arrays:
        return {name: array.with_raw(self.place.fetch(self.raws[name])) for name, array in self.before.items()}

    def check(self) -> None:
        assert_same(self.specified(self.fetch()), self.specified(self.after))

    def check_untouched(self) -> None:
        assert_same(self.fetch(), self.before)

    def run(self) -> None:
        self.reset()
        self.launch()
        self.check()


def put(place, arrays: Arrays, on_host: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The memory and the views of arrays at a place."""
    raws, views = {}, {}
    for name, array in arrays.items():
        raws[name], views[name] = place.put(HOST_POOLS[0] if on_host(name) else "", array)
    return raws, views


def swap_in_rows(rng, hot: int, top_k: int):
    """Short ones, long ones, and a last one that is padding."""
    return [random_row(rng, length, top_k, hot) for length in (hot // 2, hot + 1, 2 * hot, 3 * hot, hot)]


def swap_in(rng, place, direction: str = "h2d", hot: int = 300, top_k: int = 96, item: int = 656) -> PlacedCall:
    case = make_swap_in_case(
        rng,
        swap_in_rows(rng, hot, top_k),
        num_top_k=top_k,
        hot_buffer_size=hot,
        item_size_bytes=item,
        num_real_reqs=4,
    )
    raws, views = put(place, case.arrays, lambda name: name == "host_cache" and DIRECTIONS[direction][0])
    return PlacedCall(
        hisparse.load_cache_to_device_buffer_mla,
        views | case.sizes,
        place,
        raws,
        case.arrays,
        expect(case).arrays,
        lambda arrays: without_stale_plan(replace(case, arrays=arrays), case).arrays,
    )


def dsv4_swap_in(rng, place, direction: str = "h2d", hot: int = 300, top_k: int = 96) -> PlacedCall:
    case = dsv4_case(rng, swap_in_rows(rng, hot, top_k), num_top_k=top_k, hot_buffer_size=hot, num_real_reqs=4)
    raws, views = put(place, case.arrays, lambda name: name == "host_cache" and DIRECTIONS[direction][0])
    return PlacedCall(
        hisparse.load_cache_to_device_buffer_dsv4_mla,
        views | case.sizes,
        place,
        raws,
        case.arrays,
        expect_dsv4(case).arrays,
        lambda arrays: without_stale_plan(replace(case.plain, arrays=arrays), case.plain).arrays,
    )


def block_swap_in(rng, place, direction: str = "h2d", hot: int = 160, blocks: int = 8, size: int = 16) -> PlacedCall:
    rows = [random_block_row(rng, length, blocks, size, hot) for length in (hot // 2, 2 * hot, 3 * hot, hot)]
    case = block_case(rng, rows, size, hot, item_size_bytes=128, num_real_reqs=3)
    on_host = ("host_cache_k", "host_cache_v") if DIRECTIONS[direction][0] else ()
    raws, views = put(place, case.arrays, on_host.__contains__)
    return PlacedCall(
        hisparse.load_blocks_to_device_buffer_mha,
        views | case.sizes,
        place,
        raws,
        case.arrays,
        expect_blocks(case).arrays,
    )


def planned_copy(rng, place, direction: str = "h2d", item: int = 656, dsv4: bool = False) -> PlacedCall:
    batch, width = 4, 40
    rows, counts = batch * width + 5, [3, 0, width, 17]
    before = {
        "miss_src": Guarded.of(rng, rng.integers(0, rows, (batch, width)), np.int64, gap=2),
        "miss_dst": Guarded.of(rng, rng.permutation(rows)[: batch * width].reshape(batch, width), np.int32, gap=2),
        "miss_count": Guarded.of(rng, counts, np.int32),
        "num_real_reqs": Guarded.of(rng, [3], np.int32),
    }
    for name in ("host_cache", "device_buffer"):
        before[name] = random_pages(rng, rows) if dsv4 else Guarded.random(rng, np.uint8, (rows, item))
    options = {"item_size_bytes": ITEM_BYTES if dsv4 else item, "is_dsv4_layout": dsv4}
    after = {name: array.copy() for name, array in before.items()}
    copy_planned(**{name: array.view for name, array in after.items()}, **options)
    raws, views = put(place, before, lambda name: name == "host_cache" and DIRECTIONS[direction][0])
    return PlacedCall(hisparse.copy_cache_planned_mla, views | options, place, raws, before, after)


def dsv4_transfer(rng, place, direction: str = "h2d", layers: int = 3, tokens: int = 200) -> PlacedCall:
    pools = {f"{end}[{n}]": random_pages(rng, tokens) for end in ("src", "dst") for n in range(layers)}
    src, dst = rng.integers(0, tokens, 90), rng.permutation(tokens)[:90]
    src[::9], dst[5::11] = -1, -(2**40)
    before = pools | {"src_indices": Guarded.of(rng, src, np.int64), "dst_indices": Guarded.of(rng, dst, np.int64)}
    after = {name: array.copy() for name, array in before.items()}
    for n in range(layers):
        for i, j in zip(src.tolist(), dst.tolist(), strict=True):
            if i >= 0 and j >= 0:
                put_token(after[f"dst[{n}]"].view, j, get_token(before[f"src[{n}]"].view, i))
    on_host = dict(zip(("src", "dst"), DIRECTIONS[direction], strict=True))
    raws, views = put(place, before, lambda name: on_host.get(name.partition("[")[0], False))
    arguments = {name: views[name] for name in ("src_indices", "dst_indices")}
    for end in on_host:
        addresses = [address_of(views[f"{end}[{n}]"], place) for n in range(layers)]
        arguments[f"{end}_ptrs"] = place.put("", Guarded.of(rng, addresses, np.uint64))[1]
    return PlacedCall(hisparse.transfer_cache_dsv4_mla, arguments, place, raws, before, after)


def translation(rng, place, direction: str = "d2d") -> PlacedCall:
    """With its answer copied to where a test finds it."""
    mapping, locations = rng.integers(-(2**62), 2**62, 50), rng.integers(-9, 50, 3000).astype(np.int32)
    before = {"mapping": Guarded.of(rng, mapping), "locations": Guarded.of(rng, locations)}
    before["answer"] = Guarded.random(rng, np.int64, locations.shape)
    after = before | {"answer": before["answer"].copy()}
    after["answer"].view[:] = np.where(locations < 0, locations, mapping[locations])
    raws, views = put(place, before, lambda name: False)
    answer = views.pop("answer")

    def translate(**arguments: Any) -> None:
        answer.copy_(hisparse.translate_padded_hisparse_locations(**arguments))

    return PlacedCall(translate, views, place, raws, before, after)


def copy_items(rng, place, direction: str = "h2d", item: int = 132, count: int = 100) -> PlacedCall:
    before = {name: Guarded.random(rng, np.uint8, (count, item)) for name in ("src", "dst")}
    before["src_indices"] = Guarded.of(rng, rng.integers(-3, count + 3, count), np.int64)
    before["dst_indices"] = Guarded.of(rng, rng.permutation(count + 6)[:count] - 3, np.int64)
    after = {name: array.copy() for name, array in before.items()}
    reference.copy_items(**{name: array.view for name, array in after.items()}, item_size_bytes=item)
    on_host = dict(zip(("src", "dst"), DIRECTIONS[direction], strict=True))
    raws, views = put(place, before, lambda name: on_host.get(name, False))
    return PlacedCall(hisparse.copy_items, views | {"item_size_bytes": item}, place, raws, before, after)


def transfer(op: str, rng, place, direction: str = "h2d") -> PlacedCall:
    shape = Shape(item_size=656, head_num=4 if op in HEAD_OPS else 1, page_size=16, tokens=64)
    case = make_case(rng, op, shape)
    placed = Placed(rng, place, case, direction)
    before = case.flat()
    raws = {name: placed.raws[name] for name in before}
    return PlacedCall(
        getattr(kvcacheio, op),
        placed.views | case.sizes,
        place,
        raws,
        before,
        expect_transfer(case).flat(),
        kept_alive=placed.raws,
    )


def direct(op: str, rng, place, direction: str = "h2d") -> PlacedCall:
    case = DirectCase(rng, op)
    names, ends = case.names(), ("src_indices", "dst_indices")
    lists = dict(zip(names, (case.src, case.dst), strict=True))
    indices = dict(zip(ends, case.indices, strict=True))
    expected = lists | {names[1]: [array.copy() for array in case.dst]}
    views_of = {name: [array.view for array in arrays] for name, arrays in expected.items()}
    getattr(kvcacheio_reference, op)(**views_of, **{name: a.view for name, a in indices.items()}, **case.options)

    def flat(of: dict[str, list[Guarded]]) -> Arrays:
        return {f"{name}[{n}]": array for name, arrays in of.items() for n, array in enumerate(arrays)} | indices

    on_host = dict(zip(names, DIRECTIONS[direction], strict=True))
    raws, views = put(place, flat(lists), lambda name: on_host.get(name.partition("[")[0], True))
    arguments = {name: [views[f"{name}[{n}]"] for n in range(len(arrays))] for name, arrays in lists.items()}
    arguments |= {name: views[name] for name in ends} | case.options
    return PlacedCall(getattr(kvcacheio, op), arguments, place, raws, flat(lists), flat(expected))


def embedding_ranges(rng, place, direction: str = "h2d") -> PlacedCall:
    before = {name: Guarded.random(rng, np.float32, (20, 9), lead=4) for name in ("src", "dst")}
    after = {name: array.copy() for name, array in before.items()}
    ranges = {"src_starts": [3, 0, 12], "dst_starts": [0, 10, 14], "lengths": [4, 1, 6]}
    kvcacheio_reference.transfer_embedding_ranges_direct(after["src"].view, after["dst"].view, *ranges.values())
    on_host = dict(zip(("src", "dst"), DIRECTIONS[direction], strict=True))
    raws, views = put(place, before, on_host.__getitem__)
    return PlacedCall(kvcacheio.transfer_embedding_ranges_direct, views | ranges, place, raws, before, after)


# Kernels, which graphs capture, and copies that the driver makes.
KERNEL_CALLS = {
    "load_cache_to_device_buffer_mla": swap_in,
    "load_cache_to_device_buffer_dsv4_mla": dsv4_swap_in,
    "load_blocks_to_device_buffer_mha": block_swap_in,
    "copy_cache_planned_mla": planned_copy,
    "copy_cache_planned_mla of pages": partial(planned_copy, dsv4=True),
    "transfer_cache_dsv4_mla": dsv4_transfer,
    "translate_padded_hisparse_locations": translation,
    "copy_items": copy_items,
    **{op: partial(transfer, op) for op in OPS},
}
DIRECT_CALLS = {
    **{op: partial(direct, op) for op in DIRECT_OPS},
    "transfer_embedding_ranges_direct": embedding_ranges,
}
PLACED_CALLS = KERNEL_CALLS | DIRECT_CALLS


def tensors_of(arguments: dict[str, Any]) -> list[tuple[str, int | None, Any]]:
    """(argument, place in its list or None, tensor) of each tensor that a call gets."""
    found: list[tuple[str, int | None, Any]] = []
    for name, value in arguments.items():
        if isinstance(value, list) and value and hasattr(value[0], "device"):
            found += [(name, n, tensor) for n, tensor in enumerate(value)]
        elif hasattr(value, "device"):
            found.append((name, None, value))
    return found


def with_tensor(arguments: dict[str, Any], name: str, n: int | None, tensor: Any) -> dict[str, Any]:
    """The arguments with another tensor in one place."""
    if n is None:
        return arguments | {name: tensor}
    return arguments | {name: [tensor if i == n else other for i, other in enumerate(arguments[name])]}
