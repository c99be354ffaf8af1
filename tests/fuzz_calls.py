"""The calls that the fuzzer makes: plain values that say all about a call, whose repr is the code that repeats it.

To add an op: a dataclass here or in fuzz_family.py, with `check(place)` and `calls` (how many calls that are), a
strategy for it, and a line in STRATEGIES.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import fuzz_family
import kvcacheio_cases
import kvcacheio_reference
import numpy as np
import reference
from decode_cases import BRINGS, Decode
from direct_cases import DIRECT_OPS, DirectCase
from fuzz_family import BlockSwapIn, Dsv4SwapIn, Dsv4Transfer, PlannedCopy, Translate
from hypothesis import strategies as st
from places import HOST_POOLS, CpuPlace, Guarded, assert_same, call, make_place
from swap_in_cases import Row, check, make_case, random_row

import hisparse
from hisparse import kvcacheio

BLOCK_SIZES = (64, 128, 256, 512, 960, 1024)
INDEX_DTYPES = ("int32", "int64")
# Around the gates of the item copies: whole words of each width, a wavefront of them, and a little more.
ITEM_SIZES = st.integers(1, 80) | st.sampled_from([132, 144, 511, 512, 520, 576, 584, 656, 1024, 1028, 1040, 1152])
LEADS = st.tuples(*[st.sampled_from([0, 0, 8, 4, 1, 13])] * 2)
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class SmallSwapIn:
    """A swap-in whose entries and slots are all written out, so that a failure shrinks to a call that can be read."""

    seed: int
    rows: tuple[tuple, ...]  # the arguments of a Row
    shape: dict
    options: dict
    calls = 1

    def check(self, place) -> None:
        rows = [Row(seq_len, top_k, dict(resident), lru) for seq_len, top_k, resident, lru in self.rows]
        check(place, make_case(np.random.default_rng(self.seed), rows, **self.shape), **self.options)


@dataclass(frozen=True)
class LargeSwapIn:
    seed: int
    hot_buffer_size: int
    num_top_k: int
    lengths: tuple[int, ...]  # beyond the hot buffer
    hit_rate: float
    noise: float
    shape: dict
    options: dict
    calls = 1

    def check(self, place) -> None:
        rng, hot = np.random.default_rng(self.seed), self.hot_buffer_size
        rows = [random_row(rng, hot + n, self.num_top_k, hot, self.hit_rate, self.noise) for n in self.lengths]
        case = make_case(rng, rows, num_top_k=self.num_top_k, hot_buffer_size=hot, **self.shape)
        check(place, case, **self.options)


@dataclass(frozen=True)
class DecodeSteps:
    """Swap-ins and copies one after the other, all on one state."""

    seed: int
    requests: int
    num_top_k: int
    hot_buffer_size: int
    item_size_bytes: int
    page_size: int
    pool_leads: tuple[int, int]
    steps: tuple[tuple, ...]  # hit rate, how the newest token is brought, options

    @property
    def calls(self) -> int:
        return sum(1 + (brings != "none") + options["skip_io"] for _, brings, options in self.steps)

    def check(self, place) -> None:
        sizes = (self.requests, self.num_top_k, self.hot_buffer_size, self.item_size_bytes, self.page_size)
        decode = Decode(np.random.default_rng(self.seed), *sizes, len(self.steps), self.pool_leads)
        for decode.hit_rate, decode.brings, options in self.steps:
            decode.step(place, **options)


@dataclass(frozen=True)
class CopyItems:
    seed: int
    item_size_bytes: int
    rows: tuple[int, int]
    count: int
    leads: tuple[int, int]
    blocks: int | None
    calls = 1

    def check(self, place) -> None:
        rng = np.random.default_rng(self.seed)
        shapes = [(rows, self.item_size_bytes) for rows in self.rows]
        src, dst = (
            Guarded.random(rng, np.uint8, shape, lead=lead) for shape, lead in zip(shapes, self.leads, strict=True)
        )
        count = min(self.count, self.rows[1])
        indices = [rng.integers(0, self.rows[0], count), rng.permutation(self.rows[1])[:count]]
        for side, rows in zip(indices, self.rows, strict=True):
            side[rng.random(count) < 0.1] = rng.choice([-1, -(2**63), rows, 2**40, 2**63 - 1])
        arrays = {
            "src": src,
            "dst": dst,
            "src_indices": Guarded.of(rng, indices[0], np.int64, lead=8),
            "dst_indices": Guarded.of(rng, indices[1], np.int64),
        }
        expected = {name: array.copy() for name, array in arrays.items()}
        views = {name: array.view for name, array in expected.items()}
        reference.copy_items(**views, item_size_bytes=self.item_size_bytes)
        options = {"item_size_bytes": self.item_size_bytes, "blocks": self.blocks}
        assert_same(call(place, hisparse.copy_items, arrays, **options), expected)


@dataclass(frozen=True)
class Transfer:
    seed: int
    op: str
    shape: dict
    count: int
    direction: str
    options: dict
    calls = 1

    def check(self, place) -> None:
        rng = np.random.default_rng(self.seed)
        shape = kvcacheio_cases.Shape(**self.shape)
        case = kvcacheio_cases.make_case(rng, self.op, shape, min(self.count, shape.tokens))
        kvcacheio_cases.check(rng, place, case, self.direction, **self.options)


@dataclass(frozen=True)
class Direct:
    seed: int
    op: str
    shape: dict
    direction: str
    indices_on_host: bool
    calls = 1

    def check(self, place) -> None:
        case = DirectCase(np.random.default_rng(self.seed), self.op, **self.shape)
        case.check(place, self.direction, self.indices_on_host)


@dataclass(frozen=True)
class EmbeddingRanges:
    seed: int
    rows: tuple[int, int]
    columns: int
    ranges: tuple[tuple[float, float, float], ...]  # starts and length as shares of what is possible
    calls = 1

    def check(self, place) -> None:
        rng = np.random.default_rng(self.seed)
        src, dst = (Guarded.random(rng, np.uint16, (rows, self.columns), lead=2) for rows in self.rows)
        lengths = [round(n * min(self.rows)) for _, _, n in self.ranges]
        starts = [
            [round(r[side] * (rows - n)) for r, n in zip(self.ranges, lengths, strict=True)]
            for side, rows in enumerate(self.rows)
        ]
        expected = dst.copy()
        kvcacheio_reference.transfer_embedding_ranges_direct(src.view, expected.view, *starts, lengths)
        placed = [place.put(HOST_POOLS[0] if n == 0 else "", array) for n, array in enumerate((src, dst))]
        kvcacheio.transfer_embedding_ranges_direct(*(view for _, view in placed), *starts, lengths)
        got = [array.with_raw(place.fetch(raw)) for array, (raw, _) in zip((src, dst), placed, strict=True)]
        assert_same({"src": got[0], "dst": got[1]}, {"src": src, "dst": expected})


@dataclass(frozen=True)
class LayerCopy:
    seed: int
    rows: int
    strides: tuple[int, ...]
    count: int
    calls = 1

    def check(self, place) -> None:
        del place  # the op knows the CPU only
        rng = np.random.default_rng(self.seed)
        layers = [Guarded.random(rng, np.uint8, (self.rows, stride)) for stride in self.strides]
        targets = rng.permutation(self.rows)[: self.count]
        sources = rng.integers(0, self.rows, len(targets))
        for locs in (targets, sources):
            locs[rng.random(len(locs)) < 0.1] = rng.choice([-1, -(2**63)])
        kept = (targets >= 0) & (sources >= 0)
        expected = [layer.copy() for layer in layers]
        for want, layer in zip(expected, layers, strict=True):
            want.view[targets[kept]] = layer.view[sources[kept]]
        pointers = np.array([layer.view.ctypes.data for layer in layers], np.uint64)
        kvcacheio.copy_all_layer_kv_cache_cpu(pointers, np.array(self.strides), targets, sources)
        assert_same(dict(enumerate(layers)), dict(enumerate(expected)))


Call = SmallSwapIn | LargeSwapIn | DecodeSteps | CopyItems | Transfer | Direct | EmbeddingRanges | LayerCopy
Call |= Dsv4SwapIn | BlockSwapIn | PlannedCopy | Dsv4Transfer | Translate


@dataclass(frozen=True)
class Example:
    """A call at a place. On the CPU target `schedule` is the seed of the order in which its threads run."""

    place: str
    schedule: int
    call: Call

    def check(self) -> None:
        place = make_place(self.place)
        if isinstance(place, CpuPlace):
            place.seeds = itertools.count(self.schedule)
        self.call.check(place)


def swap_in_options():
    return st.fixed_dictionaries(
        {
            "block_size": st.sampled_from(BLOCK_SIZES),
            "blocks_per_request": st.none() | st.integers(1, 8),
            "skip_io": st.booleans(),
        }
    )


def case_shapes(rows: int):
    return st.fixed_dictionaries(
        {
            "item_size_bytes": ITEM_SIZES,
            "page_size": st.integers(1, 4),
            "num_real_reqs": st.none() | st.integers(-1, rows + 1),
            "plan": st.booleans(),
            "pool_leads": LEADS,
            "index_dtypes": st.tuples(st.sampled_from(INDEX_DTYPES), st.sampled_from(INDEX_DTYPES)),
        }
    )


@st.composite
def small_swap_ins(draw):
    hot = draw(st.integers(1, 12))
    num_top_k = draw(st.integers(1, hot))
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        seq_len = draw(st.integers(-1, hot + 20))
        entries = st.lists(st.integers(-2, max(seq_len, 0) + 1), max_size=num_top_k)
        held = draw(st.lists(st.integers(0, max(seq_len, 0) + 1), unique=True, max_size=hot))
        slots, lru = draw(st.permutations(range(hot))), draw(st.permutations(range(hot)))
        resident = tuple(zip(slots, held, strict=False))
        rows.append((seq_len, tuple(draw(entries)), resident, tuple(lru)))
    shape = draw(case_shapes(len(rows))) | {"num_top_k": num_top_k, "hot_buffer_size": hot}
    return SmallSwapIn(draw(SEEDS), tuple(rows), shape, draw(swap_in_options()))


@st.composite
def large_swap_ins(draw):
    hot = draw(st.integers(1, 600))
    lengths = tuple(draw(st.lists(st.integers(-hot // 8, 2 * hot + 2), min_size=1, max_size=4)))
    return LargeSwapIn(
        draw(SEEDS),
        hot,
        draw(st.integers(1, hot)),
        lengths,
        draw(st.sampled_from([0.0, 0.2, 0.8, 1.0])),
        draw(st.sampled_from([0.0, 0.1, 0.5])),
        draw(case_shapes(len(lengths))),
        draw(swap_in_options()),
    )


@st.composite
def decode_steps(draw):
    hot = draw(st.integers(1, 80))
    dtypes = st.tuples(st.sampled_from(INDEX_DTYPES), st.sampled_from(INDEX_DTYPES))
    step = st.tuples(
        st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        st.sampled_from(BRINGS),
        st.builds(lambda options, dtypes: options | {"index_dtypes": dtypes}, swap_in_options(), dtypes),
    )
    return DecodeSteps(
        draw(SEEDS),
        draw(st.integers(1, 4)),
        draw(st.integers(1, hot)),
        hot,
        draw(ITEM_SIZES),
        draw(st.integers(1, 3)),
        draw(LEADS),
        tuple(draw(st.lists(step, min_size=1, max_size=6))),
    )


def copies():
    rows = st.integers(1, 300)
    blocks = st.none() | st.integers(1, 5)
    return st.builds(CopyItems, SEEDS, ITEM_SIZES, st.tuples(rows, rows), st.integers(0, 300), LEADS, blocks)


@st.composite
def transfers(draw):
    op = draw(st.sampled_from(sorted(kvcacheio_cases.OPS)))
    heads = draw(st.integers(1, 5)) if op in kvcacheio_cases.HEAD_OPS else 1
    item, layers = draw(ITEM_SIZES) * heads, draw(st.integers(1, 4))
    page_size = draw(st.integers(1, 8))
    shape = {
        "item_size": item,
        "num_layers": layers,
        "layer_id": draw(st.integers(0, layers - 1)),
        "page_size": page_size,
        "head_num": heads,
        "tokens": page_size * draw(st.integers(1, 40 // page_size)),
        "padding": heads * draw(st.integers(0, item // heads - 1)),
        "leads": draw(LEADS),
    }
    warps = st.none() | st.sampled_from([1, 2, 5, 16])
    options = st.fixed_dictionaries({"block_quota": st.integers(1, 4), "num_warps_per_block": warps})
    direction = draw(st.sampled_from(sorted(kvcacheio_cases.DIRECTIONS)))
    return Transfer(draw(SEEDS), op, shape, draw(st.integers(0, 40)), direction, draw(options))


@st.composite
def direct_transfers(draw):
    op, layers = draw(st.sampled_from(DIRECT_OPS)), draw(st.integers(1, 4))
    shape = {
        "page_size": draw(st.integers(1, 8)),
        "count": draw(st.integers(0, 12)),
        "layers": layers,
        "sides": draw(st.integers(1, 2)),
        "token": draw(st.sampled_from([(1,), (7,), (2, 36), (144,), (584,)])),
    }
    if op != "transfer_kv_direct":
        shape["pool_layers"] = layers + draw(st.integers(0, 2))
    if op == "transfer_kv_per_layer_direct_pf_lf":
        shape["layer_id"] = draw(st.integers(0, shape["pool_layers"] - layers))
    direction = draw(st.sampled_from(["h2d", "d2h"]))
    return Direct(draw(SEEDS), op, shape, direction, draw(st.booleans()))


def embedding_ranges():
    rows, share = st.integers(1, 40), st.floats(0, 1)
    ranges = st.lists(st.tuples(share, share, share), max_size=5).map(tuple)
    return st.builds(EmbeddingRanges, SEEDS, st.tuples(rows, rows), st.integers(1, 50), ranges)


def layer_copies():
    strides = st.lists(st.integers(1, 700), min_size=1, max_size=4).map(tuple)
    return st.builds(LayerCopy, SEEDS, st.integers(1, 60), strides, st.integers(0, 60))


# Kind of call: its strategy, and its share of the examples in hundredths.
STRATEGIES = {
    "small swap-in": (small_swap_ins(), 22),
    "large swap-in": (large_swap_ins(), 10),
    "decode": (decode_steps(), 16),
    "swap-in of pages": (fuzz_family.dsv4_swap_ins(), 8),
    "swap-in of blocks": (fuzz_family.block_swap_ins(), 8),
    "planned copy": (fuzz_family.planned_copies(), 8),
    "transfer of pages": (fuzz_family.dsv4_transfers(), 3),
    "translation": (fuzz_family.translations(), 3),
    "copy_items": (copies(), 5),
    "transfer": (transfers(), 10),
    "direct": (direct_transfers(), 3),
    "embedding ranges": (embedding_ranges(), 2),
    "layer copy": (layer_copies(), 2),
}
