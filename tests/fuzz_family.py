"""The fuzzer's calls of the swap-in's relatives: DeepSeek-V4 pages, blocks with keys and values, plans, translation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from family_cases import block_case, check_blocks, check_dsv4, dsv4_case, random_block_row
from hypothesis import strategies as st
from swap_in_cases import random_row
from test_dsv4_transfer import check_transfer
from test_planned_copy import check_plan, plan_case
from test_translate import check_translation, random_arrays

SEEDS = st.integers(0, 2**32 - 1)
BLOCK_SIZES = (64, 128, 256, 960, 1024)
PAGE_LEADS = st.tuples(*[st.sampled_from([0, 0, 8, 16])] * 2)
DTYPES = ("int32", "int64")


@dataclass(frozen=True)
class Dsv4SwapIn:
    seed: int
    hot_buffer_size: int
    num_top_k: int
    lengths: tuple[int, ...]  # beyond the hot buffer
    hit_rate: float
    shape: dict
    options: dict
    calls = 1

    def check(self, place) -> None:
        rng, hot = np.random.default_rng(self.seed), self.hot_buffer_size
        rows = [random_row(rng, hot + n, self.num_top_k, hot, self.hit_rate) for n in self.lengths]
        case = dsv4_case(rng, rows, num_top_k=self.num_top_k, hot_buffer_size=hot, **self.shape)
        check_dsv4(place, case, **self.options)


@dataclass(frozen=True)
class BlockSwapIn:
    seed: int
    sparse_block_size: int
    width: int
    more_slots: int
    lengths: tuple[int, ...]
    noise: float
    shape: dict
    options: dict
    calls = 1

    def check(self, place) -> None:
        rng = np.random.default_rng(self.seed)
        hot = self.width * self.sparse_block_size + self.more_slots
        sizes = (self.width, self.sparse_block_size, hot, self.noise)
        rows = [random_block_row(rng, max(hot + n, 0), *sizes) for n in self.lengths]
        check_blocks(place, block_case(rng, rows, self.sparse_block_size, hot, **self.shape), **self.options)


@dataclass(frozen=True)
class PlannedCopy:
    seed: int
    counts: tuple[int, ...]
    width: int
    shape: dict
    options: dict
    calls = 1

    def check(self, place) -> None:
        rng = np.random.default_rng(self.seed)
        counts = [min(count, self.width) for count in self.counts]
        check_plan(place, *plan_case(rng, counts, self.width, **self.shape), **self.options)


@dataclass(frozen=True)
class Dsv4Transfer:
    seed: int
    layers: int
    tokens: tuple[int, int]
    count: int
    leads: tuple[int, int]
    options: dict
    calls = 1

    def check(self, place) -> None:
        rng = np.random.default_rng(self.seed)
        targets = rng.permutation(self.tokens[1])[: self.count]
        sources = rng.integers(0, self.tokens[0], len(targets))
        for indices in (sources, targets):
            indices[rng.random(len(indices)) < 0.1] = rng.choice([-1, -(2**63)])
        check_transfer(place, rng, self.layers, sources, targets, self.tokens, self.leads, **self.options)


@dataclass(frozen=True)
class Translate:
    seed: int
    count: int
    entries: int
    dtypes: tuple[str, str]
    step: int
    calls = 1

    def check(self, place) -> None:
        rng = np.random.default_rng(self.seed)
        arrays = random_arrays(rng, self.count, self.entries, *(np.dtype(name).type for name in self.dtypes))
        check_translation(place, *arrays, self.step)


def _lengths(hot: int):
    return st.lists(st.integers(-hot // 4, 2 * hot + 2), min_size=1, max_size=3).map(tuple)


@st.composite
def dsv4_swap_ins(draw):
    hot = draw(st.integers(1, 70))
    lengths = draw(_lengths(hot))
    shape = {
        "page_size": draw(st.integers(1, 3)),
        "num_real_reqs": draw(st.none() | st.integers(-1, len(lengths) + 1)),
        "plan": draw(st.booleans()),
        "leads": draw(PAGE_LEADS),
        "index_dtypes": draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES))),
    }
    options = {
        "block_size": draw(st.sampled_from(BLOCK_SIZES)),
        "skip_io": draw(st.booleans()),
        "blocks_per_request": draw(st.none() | st.integers(1, 5)),
    }
    hit_rate = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return Dsv4SwapIn(draw(SEEDS), hot, draw(st.integers(1, hot)), lengths, hit_rate, shape, options)


@st.composite
def block_swap_ins(draw):
    sparse_block_size, width = draw(st.integers(1, 17)), draw(st.integers(1, 12))
    lengths = draw(_lengths(sparse_block_size * width))
    shape = {
        "item_size_bytes": draw(st.integers(1, 70) | st.sampled_from([128, 512, 520, 1040])),
        "leads": draw(st.tuples(*[st.sampled_from([0, 0, 8, 4, 1])] * 4)),
        "page_size": draw(st.integers(1, 3)),
        "num_real_reqs": draw(st.none() | st.integers(-1, len(lengths) + 1)),
    }
    options = {"block_size": draw(st.sampled_from(BLOCK_SIZES)), "skip_io": draw(st.booleans())}
    noise = draw(st.sampled_from([0.0, 0.1, 0.6]))
    more_slots = draw(st.integers(0, 40))
    return BlockSwapIn(draw(SEEDS), sparse_block_size, width, more_slots, lengths, noise, shape, options)


@st.composite
def planned_copies(draw):
    counts = tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)))
    dsv4 = draw(st.booleans())
    shape = {
        "item_size_bytes": draw(st.integers(1, 70) | st.sampled_from([512, 584, 1028])),
        "num_real_reqs": draw(st.none() | st.integers(-1, len(counts) + 1)),
        "dsv4": dsv4,
        "leads": draw(PAGE_LEADS if dsv4 else st.tuples(*[st.sampled_from([0, 8, 4, 1])] * 2)),
    }
    options = {
        "num_blocks": draw(st.integers(1, 5)),
        "block_size": draw(st.sampled_from(BLOCK_SIZES)),
        "skip_io": draw(st.booleans()),
    }
    return PlannedCopy(draw(SEEDS), counts, draw(st.integers(1, 40)), shape, options)


def dsv4_transfers():
    tokens = st.integers(1, 200)
    options = st.fixed_dictionaries({"block_size": st.sampled_from(BLOCK_SIZES)})
    return st.builds(
        Dsv4Transfer, SEEDS, st.integers(1, 4), st.tuples(tokens, tokens), st.integers(1, 200), PAGE_LEADS, options
    )


def translations():
    dtypes = st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES))
    return st.builds(Translate, SEEDS, st.integers(0, 700), st.integers(1, 300), dtypes, st.integers(1, 3))
