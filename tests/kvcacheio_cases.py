"""Calls of the transfers by a kernel: arrays with guard bytes in every layout, and the run of an op on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import kvcacheio_reference as reference
import numpy as np
from places import HOST_POOLS, GpuPlace, Guarded, assert_same

import hisparse.kvcacheio as kvcacheio

# op: (source layout, destination layout)
OPS = {
    "transfer_kv_per_layer": ("lf", "lf"),
    "transfer_kv_per_layer_pf_lf": ("pf", "lf"),
    "transfer_kv_per_layer_ph_lf": ("ph", "lf"),
    "transfer_kv_all_layer": ("table", "table"),
    "transfer_kv_all_layer_lf_pf": ("table", "pf"),
    "transfer_kv_all_layer_lf_ph": ("table", "ph"),
    "transfer_kv_per_layer_mla": ("lf", "lf"),
    "transfer_kv_per_layer_mla_pf_lf": ("pf", "lf"),
    "transfer_kv_all_layer_mla": ("table", "table"),
    "transfer_kv_all_layer_mla_lf_pf": ("table", "pf"),
}
HEAD_OPS = tuple(op for op, layouts in OPS.items() if "ph" in layouts)
PAGED = ("pf", "ph")
DIRECTIONS = {"h2d": (True, False), "d2h": (False, True), "d2d": (False, False), "h2h": (True, True)}


@dataclass
class Shape:
    """What a case is made of; lengths in bytes where nothing else is said."""

    item_size: int = 144
    num_layers: int = 3  # of all pools; a per-layer op moves one of them
    layer_id: int = 1
    page_size: int = 1  # tokens
    head_num: int = 1
    tokens: int = 32  # of a pool
    padding: int = 0  # of layout_dim beyond the layers
    leads: tuple[int, int] = (0, 0)  # misalignment of source and destination

    @property
    def layout_dim(self) -> int:
        return self.num_layers * self.item_size + self.padding


@dataclass
class Case:
    op: str
    shape: Shape
    pools: dict[str, list[Guarded]]  # one array per layer for a table, else one
    indices: dict[str, Guarded]
    sizes: dict[str, int]
    layers: tuple[range, range] = field(default=(range(1), range(1)))  # moved, of the source and the destination

    def copy(self) -> Case:
        pools = {name: [array.copy() for array in arrays] for name, arrays in self.pools.items()}
        indices = {name: array.copy() for name, array in self.indices.items()}
        return Case(self.op, self.shape, pools, indices, self.sizes, self.layers)

    def flat(self) -> dict[str, Guarded]:
        arrays = {f"{name}[{n}]": array for name, group in self.pools.items() for n, array in enumerate(group)}
        return arrays | self.indices


def is_latent(op: str) -> bool:
    return "_mla" in op


def side_names(op: str, end: str) -> list[str]:
    table = "_layers" if OPS[op][end == "dst"] == "table" else ""
    return [f"{end}{part}{table}" for part in ([""] if is_latent(op) else ["_k", "_v"])]


def random_pairs(rng, shape: Shape, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Any sources, repeated ones too, and destinations that differ; a third of the pairs is skipped."""
    src = rng.integers(0, shape.tokens, count)
    dst = rng.permutation(shape.tokens)[:count]
    for indices in (src, dst):
        indices[rng.random(count) < 0.17] = rng.choice([-1, -2, -(2**40), -(2**63)])
    return src, dst


def _pool(rng, layout: str, shape: Shape, lead: int) -> list[Guarded]:
    if layout == "lf":
        return [Guarded.random(rng, np.uint8, (shape.tokens, shape.item_size), lead=lead)]
    if layout == "table":
        return [
            Guarded.random(rng, np.uint8, (shape.tokens, shape.item_size), lead=lead) for _ in range(shape.num_layers)
        ]
    rows = shape.tokens if layout == "pf" else shape.tokens // shape.page_size
    row = shape.layout_dim * (1 if layout == "pf" else shape.page_size)
    return [Guarded.random(rng, np.uint8, (rows, row), lead=lead)]


def make_case(rng, op: str, shape: Shape, count: int | None = None, pairs=None) -> Case:
    src_layout, dst_layout = OPS[op]
    count = shape.tokens * 3 // 4 if count is None else count
    src_indices, dst_indices = random_pairs(rng, shape, count) if pairs is None else pairs
    pools = {}
    for end, layout, lead in (("src", src_layout, shape.leads[0]), ("dst", dst_layout, shape.leads[1])):
        for name in side_names(op, end):
            pools[name] = _pool(rng, layout, shape, lead)
    sizes = {"item_size": shape.item_size}
    layers = (range(1), range(1))
    if src_layout in PAGED:
        sizes |= {"layer_id": shape.layer_id, "src_layout_dim": shape.layout_dim}
        layers = (range(shape.layer_id, shape.layer_id + 1), range(1))
    if dst_layout in PAGED:
        sizes["dst_layout_dim"] = shape.layout_dim
    if src_layout == "table":
        sizes["num_layers"] = shape.num_layers
        layers = (range(shape.num_layers), range(shape.num_layers))
    if "ph" in OPS[op]:
        sizes |= {"page_size": shape.page_size, "head_num": shape.head_num}
    indices = {
        "src_indices": Guarded.of(rng, src_indices, np.int64, lead=8),
        "dst_indices": Guarded.of(rng, dst_indices, np.int64),
    }
    return Case(op, shape, pools, indices, sizes, layers)


def _view(layout: str, arrays: list[Guarded], shape: Shape):
    views = [array.view for array in arrays]
    if layout == "pf":
        return reference.PageFirst(views[0], shape.item_size, shape.layout_dim)
    if layout == "ph":
        return reference.PageHead(views[0], shape.item_size, shape.layout_dim, shape.page_size, shape.head_num)
    return reference.LayerFirst(views, shape.item_size)


def expect(case: Case) -> Case:
    expected = case.copy()
    for src_name, dst_name in zip(side_names(case.op, "src"), side_names(case.op, "dst"), strict=True):
        ends = [
            _view(layout, expected.pools[name], case.shape)
            for layout, name in zip(OPS[case.op], (src_name, dst_name), strict=True)
        ]
        indices = (case.indices[f"{end}_indices"].view for end in ("src", "dst"))
        reference.transfer(*ends, *indices, *case.layers)
    return expected


def address_of(view: Any, place) -> int:
    """What a layer table holds. Host memory need not be one that a GPU of the machine reaches."""
    if isinstance(place, GpuPlace):
        return kvcacheio.get_device_accessible_ptr(view, place.device.index)
    return view.ctypes.data if isinstance(view, np.ndarray) else view.data_ptr()


class Placed:
    """A case whose arrays lie where the place has them; on a GPU the direction says which pools are pinned."""

    def __init__(self, rng, place, case: Case, direction: str = "h2d"):
        self.place, self.case, self.raws, self.views = place, case, {}, {}
        on_host = dict(zip(("src", "dst"), DIRECTIONS[direction], strict=True))
        for name, arrays in case.pools.items():
            layers = []
            for n, array in enumerate(arrays):
                self.raws[f"{name}[{n}]"], view = self.put(array, on_host[name[:3]])
                layers.append(view)
            self.views[name] = layers[0]
            if name.endswith("_layers"):
                # The layers themselves are kept alive by what lies in raws.
                table = Guarded.of(rng, [address_of(view, place) for view in layers], np.uint64)
                self.raws[name + " table"], self.views[name] = self.put(table, False)
        for name, array in case.indices.items():
            self.raws[name], self.views[name] = self.put(array, False)

    def put(self, array: Guarded, on_host: bool):
        return self.place.put(HOST_POOLS[0] if on_host else "", array)

    def launch(self, **options) -> None:
        with self.place.options():
            assert getattr(kvcacheio, self.case.op)(**{**self.views, **self.case.sizes, **options}) is None

    def fetch(self) -> dict[str, Guarded]:
        return {name: array.with_raw(self.place.fetch(self.raws[name])) for name, array in self.case.flat().items()}


def check(rng, place, case: Case, direction: str = "h2d", **options) -> None:
    """Runs the op and compares every byte, guards included, with the reference."""
    placed = Placed(rng, place, case, direction)
    placed.launch(**options)
    assert_same(placed.fetch(), expect(case).flat())
