"""Broken contents: the result is unspecified, but nothing outside the rows that the tables name is touched."""

from __future__ import annotations

import numpy as np
import pytest
from places import assert_same
from swap_in_cases import Row, check, expect, make_case, random_row, run, without_stale_plan

HOT, NUM_TOP_K, ITEM = 32, 20, 20


def broken_case(rng, rows=3):
    rows = [random_row(rng, 90, NUM_TOP_K, HOT, 0.5) for _ in range(rows)]
    return make_case(rng, rows, num_top_k=NUM_TOP_K, hot_buffer_size=HOT, item_size_bytes=ITEM)


def assert_contained(case, after, *, tokens=True):
    """Inputs, guards, gaps, tables of other requests and pool rows that no table names are as they were."""
    written = ("top_k_device_locs", "miss_src", "miss_dst", "miss_count", "device_buffer", "lru_slots")
    restored = after.copy()
    rids = case["req_pool_indices"]
    for name in written:
        width = {"lru_slots": HOT, "top_k_device_locs": NUM_TOP_K, "miss_src": NUM_TOP_K, "miss_dst": NUM_TOP_K}
        if name == "lru_slots":
            restored[name][rids, :HOT] = case[name][rids, :HOT]
        elif name == "device_buffer":
            named = case["device_buffer_locs"][rids, :HOT].ravel()
            named = named[(named >= 0) & (named < len(case[name]))]
            restored[name][named] = case[name][named]
        elif name in width:
            restored[name][:, : width[name]] = case[name][:, : width[name]]
        else:
            restored[name][:] = case[name]
    restored["device_buffer_tokens"][rids, :HOT] = case["device_buffer_tokens"][rids, :HOT]
    assert_same(restored.arrays, case.arrays)


@pytest.mark.parametrize("rid", [-1, -(2**31), 2**31 - 1, 2**32, -(2**40), 2**63 - 1, "rows"])
def test_a_request_outside_the_tables_has_no_locs(place, rng, rid):
    case = make_case(
        rng,
        [random_row(rng, 90, NUM_TOP_K, HOT, 0.5) for _ in range(3)],
        num_top_k=NUM_TOP_K,
        hot_buffer_size=HOT,
        index_dtypes=(np.int64, np.int32),
    )
    case["req_pool_indices"][1] = len(case["device_buffer_tokens"]) if rid == "rows" else rid
    after = run(place, case)
    assert (after["top_k_device_locs"][1, :NUM_TOP_K] == -1).all()

    others = case.copy()
    others["req_pool_indices"][1], others["seq_lens"][1] = np.setdiff1d(np.arange(3), case["req_pool_indices"])[0], 0
    expected, after = without_stale_plan(expect(others), case), without_stale_plan(after, case)
    for unspecified in ("miss_src", "miss_dst", "miss_count"):
        expected[unspecified][1] = after[unspecified][1]
    for name in ("req_pool_indices", "seq_lens"):
        expected[name][1] = after[name][1]
    assert_same(after.arrays, expected.arrays)


@pytest.mark.parametrize("loc", [-1, -(2**40), 2**40, 2**32, "rows"])
def test_a_host_loc_outside_the_pool_is_not_read(place, rng, loc):
    case = broken_case(rng)
    case["host_cache_locs"][case["req_pool_indices"][1]] = len(case["host_cache"]) if loc == "rows" else loc
    after = run(place, case)
    assert_contained(case, after)
    untouched = case["device_buffer_locs"][case["req_pool_indices"][1], :HOT]
    assert np.array_equal(after["device_buffer"][untouched], case["device_buffer"][untouched])


@pytest.mark.parametrize("loc", [-1, -(2**31), 2**31 - 1, "rows"])
def test_a_device_loc_outside_the_pool_is_not_written(place, rng, loc):
    case = broken_case(rng)
    case["device_buffer_locs"][case["req_pool_indices"][1]] = len(case["device_buffer"]) if loc == "rows" else loc
    assert_contained(case, run(place, case))


@pytest.mark.parametrize("max_tokens", [1, 40, 89])
def test_tokens_past_the_end_of_host_cache_locs_are_not_looked_up(place, rng, max_tokens):
    case = broken_case(rng)
    wide = case.arrays["host_cache_locs"]
    assert wide.shape[1] >= 90
    after = run(place, case, lambda views: views | {"host_cache_locs": views["host_cache_locs"][:, :max_tokens]})
    assert_contained(case, after)
    for b in range(3):
        rid = case["req_pool_indices"][b]
        filled = np.flatnonzero(case.tokens(b) != after.tokens(b))
        beyond = filled[after.tokens(b)[filled] >= max_tokens]
        locs = case["device_buffer_locs"][rid, beyond]
        assert np.array_equal(after["device_buffer"][locs], case["device_buffer"][locs])


@pytest.mark.parametrize("hot", [HOT, HOT - 2])  # slots are looked at in fours
@pytest.mark.parametrize("kind", ["outside", "negative", "garbage", "repeated"])
def test_a_broken_lru_row_writes_no_other_request(place, rng, monkeypatch, kind, hot):
    monkeypatch.setitem(globals(), "HOT", hot)
    case = broken_case(rng)
    row = case["lru_slots"][case["req_pool_indices"][1], :HOT]
    row[:] = {
        "outside": np.arange(HOT) + HOT,
        "negative": -1 - np.arange(HOT),
        "garbage": rng.integers(-(2**15), 2**15, HOT),
        "repeated": np.full(HOT, 3),
    }[kind]
    assert_contained(case, run(place, case))


def test_a_token_in_two_slots_stays_inside_the_request(place, rng):
    case = broken_case(rng)
    case["device_buffer_tokens"][case["req_pool_indices"][1], :HOT] = case["top_k_tokens"][1, 0]
    assert_contained(case, run(place, case))


def test_two_rows_of_one_request_stay_inside_the_request(place, rng):
    case = broken_case(rng)
    case["req_pool_indices"][1] = case["req_pool_indices"][0]
    assert_contained(case, run(place, case))


def test_the_call_after_a_broken_one_is_right(place, rng):
    case = broken_case(rng)
    case["lru_slots"][:] = rng.integers(-(2**15), 2**15, case["lru_slots"].shape)
    case["host_cache_locs"][:] = -1
    run(place, case)
    check(place, make_case(rng, [Row(90, range(20))], num_top_k=NUM_TOP_K, hot_buffer_size=HOT))
