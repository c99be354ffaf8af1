"""Calls of the direct transfers of hisparse.kvcacheio: pools in lists, page by page."""

from __future__ import annotations

import kvcacheio_reference as reference
import numpy as np
from kvcacheio_cases import DIRECTIONS
from places import HOST_POOLS, Guarded, assert_same

import hisparse.kvcacheio as kvcacheio

DIRECT_OPS = ("transfer_kv_direct", "transfer_kv_per_layer_direct_pf_lf", "transfer_kv_all_layer_direct_lf_pf")


def pages(rng, count: int, page_size: int, pool_pages: int) -> np.ndarray:
    """The tokens of `count` different pages in random order."""
    numbers = rng.permutation(pool_pages)[:count]
    return (numbers[:, None] * page_size + np.arange(page_size)).reshape(-1)


class DirectCase:
    """The arrays of a direct op: tensors in two lists, and indices."""

    def __init__(
        self, rng, op, *, page_size=16, count=5, layers=3, sides=2, token=(2, 36), layer_id=0, pool_layers=None
    ):
        self.op, self.page_size, pool_pages = op, page_size, count + 3
        self.options = {"page_size": page_size}
        pool_layers = pool_layers or layers
        if op == "transfer_kv_per_layer_direct_pf_lf":
            self.options["layer_id"] = layer_id
        plain = [
            Guarded.random(rng, np.uint8, (pool_pages * page_size, *token), lead=4 * (n % 3))
            for n in range(layers * sides)
        ]
        if op == "transfer_kv_direct":
            others = [Guarded.random(rng, np.uint8, array.shape) for array in plain]
        else:
            shape = (pool_pages, pool_layers, page_size, *token)
            others = [Guarded.random(rng, np.uint8, shape) for _ in range(sides)]
        self.src, self.dst = (others, plain) if op.endswith("pf_lf") else (plain, others)
        self.indices = [Guarded.of(rng, pages(rng, count, page_size, pool_pages), np.int64) for _ in range(2)]

    def names(self) -> tuple[str, str]:
        return ("src_layers", "dst_layers") if self.op == "transfer_kv_direct" else ("src_ptrs", "dst_ptrs")

    def check(self, place, direction="h2d", indices_on_host=True) -> None:
        expected = [array.copy() for array in self.dst]
        arrays = dict(zip(self.names(), ([a.view for a in self.src], [a.view for a in expected]), strict=True))
        indices = {f"{end}_indices": a.view for end, a in zip(("src", "dst"), self.indices, strict=True)}
        getattr(reference, self.op)(**arrays, **indices, **self.options)

        on_host = DIRECTIONS[direction]
        placed = [[place.put(HOST_POOLS[0] if at_host else "", a) for a in arrays] for at_host, arrays in zip(
            (*on_host, indices_on_host), (self.src, self.dst, self.indices), strict=True)]  # fmt: skip
        views = [[view for _, view in group] for group in placed]
        with place.options():
            assert getattr(kvcacheio, self.op)(views[0], views[1], *views[2], **self.options) is None
        for group, wanted in zip(placed, (self.src, expected, self.indices), strict=True):
            got = {
                str(n): a.with_raw(place.fetch(raw)) for n, (a, (raw, _)) in enumerate(zip(wanted, group, strict=True))
            }
            assert_same(got, {str(n): array for n, array in enumerate(wanted)})
