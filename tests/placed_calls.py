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
from kvcacheio_cases import DIRECTIONS, HEAD_OPS, OPS, Placed, Shape, make_case
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


def swap_in_case(rng, hot: int = 300, top_k: int = 96, item: int = 656):
    rows = [random_row(rng, length, top_k, hot) for length in (hot // 2, hot + 1, 2 * hot, 3 * hot, hot)]
    return make_swap_in_case(
        rng, rows, num_top_k=top_k, hot_buffer_size=hot, item_size_bytes=item, num_real_reqs=len(rows) - 1
    )


def swap_in(rng, place, direction: str = "h2d", **sizes: int) -> PlacedCall:
    case = swap_in_case(rng, **sizes)
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
