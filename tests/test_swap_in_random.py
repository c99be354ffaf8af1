"""load_cache_to_device_buffer_mla over many steps and over random calls, compared byte for byte with the reference."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import CPU_PLACES, make_place, torch
from swap_in_cases import TABLES, Row, check, make_case, random_entries, random_row

EXAMPLES = int(os.environ.get("HISPARSE_TEST_EXAMPLES", 200))
PLACES = [name for name in CPU_PLACES if torch is not None or name.endswith("numpy")]


class Decode:
    """Requests that grow by a token a step. A step takes some of them in any order, pads the batch, and hands the state
    that the op leaves to the next step."""

    def __init__(self, rng, requests, num_top_k, hot_buffer_size, item_size_bytes, page_size, steps):
        self.rng, self.hit_rate = rng, 0.9
        # Some requests are short and grow over the length of the buffer, the others start cold.
        spread = rng.integers(-steps // 2, 3 * hot_buffer_size, requests)
        lengths = np.maximum(hot_buffer_size + spread, 1)
        rows = [Row(int(n), [], None if n <= hot_buffer_size else {}) for n in lengths]
        case = make_case(
            rng,
            rows,
            num_top_k=num_top_k,
            hot_buffer_size=hot_buffer_size,
            item_size_bytes=item_size_bytes,
            page_size=page_size,
            max_tokens=int(max(lengths.max(), 2 * hot_buffer_size)) + steps + 1,
            stale_host_locs=False,
        )
        self.sizes = case.sizes
        self.tables = {name: case.arrays[name] for name in TABLES}
        self.rids = case["req_pool_indices"].copy()
        self.length = dict(zip(self.rids.tolist(), lengths.tolist(), strict=True))

    def step(self, place, **options):
        rng, hot, num_top_k = self.rng, self.sizes["hot_buffer_size"], self.sizes["num_top_k"]
        views = {name: table.view for name, table in self.tables.items()}
        chosen = rng.permutation(self.rids)[: rng.integers(1, len(self.rids) + 1)]
        rows = []
        for rid in chosen.tolist():
            self.length[rid] += 1
            length = self.length[rid]
            if rng.random() < 0.03:  # another request has taken this place in the tables
                length = self.length[rid] = hot + 1 + int(rng.integers(hot))
                views["device_buffer_tokens"][rid, :hot] = -1
                views["lru_slots"][rid, :hot] = np.arange(hot)
            newest = views["host_cache"][views["host_cache_locs"][rid, length - 1]]
            slot = hot if length > hot else length - 1
            views["device_buffer"][views["device_buffer_locs"][rid, slot]] = newest
            slot_tokens = views["device_buffer_tokens"][rid, :hot]
            entries = (
                random_entries(rng, slot_tokens, length, num_top_k, self.hit_rate)
                if length > hot
                else rng.integers(-1, length + 1, num_top_k)
            )
            rows.append(Row(length, entries, slot_tokens.copy(), views["lru_slots"][rid, :hot].copy()))

        padding = [Row(hot + 5, range(num_top_k)) for _ in range(rng.integers(3))]
        case = make_case(
            rng, rows + padding, num_real_reqs=len(rows), plan=bool(rng.random() < 0.7), spare_requests=0, **self.sizes
        )
        case.arrays |= self.tables
        case["req_pool_indices"][: len(rows)] = chosen
        case["req_pool_indices"][len(rows) :] = rng.choice(self.rids, len(padding))
        after = check(place, case, **options)
        self.tables = {name: after.arrays[name] for name in TABLES}


@pytest.mark.parametrize("block_size", [256, 512, 960, 1024])
@pytest.mark.parametrize(
    ("num_top_k", "hot_buffer_size", "item_size_bytes"), [(16, 16, 20), (37, 50, 132), (200, 333, 656), (5, 700, 7)]
)
def test_dozens_of_steps(sweep_place, rng, num_top_k, hot_buffer_size, item_size_bytes, block_size):
    decode = Decode(rng, 6, num_top_k, hot_buffer_size, item_size_bytes, int(rng.choice([1, 4])), steps=40)
    for step in range(40):
        decode.hit_rate = (0.95, 0.5, 0.0, 1.0)[step // 10]
        decode.step(sweep_place, block_size=block_size, blocks_per_request=int(rng.integers(1, 5)))


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_random_shape_everywhere(place, rng, seed):
    hot_buffer_size = int(rng.integers(1, 120))
    num_top_k = int(rng.integers(1, hot_buffer_size + 1))
    decode = Decode(rng, 4, num_top_k, hot_buffer_size, int(rng.integers(1, 90)), int(rng.integers(1, 4)), steps=25)
    for _ in range(25):
        decode.hit_rate = rng.random()
        decode.step(place, block_size=int(rng.choice([256, 512, 960, 1024])), skip_io=False)


def test_steps_at_model_size(sweep_place, rng):
    decode = Decode(rng, 3, 2048, 4096, 144, 64, steps=12)
    for _ in range(12):
        decode.step(sweep_place, block_size=1024)


OPTIONS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([64, 256, 512, 960, 1024]),
        "blocks_per_request": st.none() | st.integers(1, 8),
        "skip_io": st.booleans(),
    }
)
SETTINGS = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.data_too_large]
)


@st.composite
def small_calls(draw):
    """Every entry and slot drawn one by one, so that a failure shrinks to a call that can be read."""
    hot = draw(st.integers(1, 12))
    num_top_k = draw(st.integers(1, hot))
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        seq_len = draw(st.integers(-1, hot + 20))
        entry = st.integers(-2, max(seq_len, 0) + 1)
        held = draw(st.lists(st.integers(0, max(seq_len, 0) + 1), unique=True, max_size=hot))
        slots = draw(st.permutations(range(hot)))
        rows.append(
            Row(
                seq_len,
                draw(st.lists(entry, max_size=num_top_k)),
                dict(zip(slots, held, strict=False)),
                draw(st.permutations(range(hot))),
            )
        )
    return rows, {
        "num_top_k": num_top_k,
        "hot_buffer_size": hot,
        "item_size_bytes": draw(st.integers(1, 40)),
        "page_size": draw(st.integers(1, 3)),
        "num_real_reqs": draw(st.none() | st.integers(-1, len(rows) + 1)),
        "plan": draw(st.booleans()),
        "pool_leads": (draw(st.integers(0, 15)), draw(st.integers(0, 15))),
        "index_dtypes": tuple(draw(st.sampled_from([np.int32, np.int64])) for _ in range(2)),
    }


@SETTINGS
@given(st.sampled_from(PLACES), small_calls(), OPTIONS, st.integers(0, 2**32 - 1))
def test_small_calls(place_name, call, options, seed):
    rows, shape = call
    check(make_place(place_name), make_case(np.random.default_rng(seed), rows, **shape), **options)


@SETTINGS
@given(
    place_name=st.sampled_from(PLACES),
    seed=st.integers(0, 2**32 - 1),
    hot=st.integers(1, 600),
    top_k_share=st.floats(0, 1),
    batch=st.integers(1, 4),
    item_size_bytes=st.integers(1, 700),
    hit_rate=st.floats(0, 1),
    noise=st.floats(0, 0.5),
    options=OPTIONS,
)
def test_larger_calls(place_name, seed, hot, top_k_share, batch, item_size_bytes, hit_rate, noise, options):
    rng = np.random.default_rng(seed)
    num_top_k = max(1, round(top_k_share * hot))
    lengths = hot + rng.integers(-hot // 8, 2 * hot + 2, batch)
    rows = [random_row(rng, int(n), num_top_k, hot, hit_rate, noise) for n in lengths]
    case = make_case(
        rng,
        rows,
        num_top_k=num_top_k,
        hot_buffer_size=hot,
        item_size_bytes=item_size_bytes,
        page_size=int(rng.integers(1, 5)),
        num_real_reqs=int(rng.integers(0, batch + 1)) if rng.random() < 0.5 else None,
        plan=bool(rng.random() < 0.5),
        pool_leads=tuple(rng.integers(0, 16, 2).tolist()),
    )
    check(make_place(place_name), case, **options)
