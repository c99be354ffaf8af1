"""Faults seen in the field, on the swap-in's relatives. The ids are those of tests/test_field_cases.py."""

from __future__ import annotations

import numpy as np
import pytest
from family_cases import block_case, check_blocks, check_dsv4, dsv4_case, get_token, put_token
from places import Guarded, call
from swap_in_cases import Row
from test_planned_copy import check_plan, plan_case

import hisparse
from hisparse import kvcacheio


def test_F01_a_block_of_16_waves(sweep_place, rng):
    entries = rng.permutation(5999)[:2048]
    resident = np.full(4096, -1)
    resident[rng.permutation(4096)[:1024]] = entries[:1024]
    case = dsv4_case(rng, [Row(6000, rng.permutation(entries), resident)], num_top_k=2048, hot_buffer_size=4096)
    after = check_dsv4(sweep_place, case, block_size=1024)
    rid = case["req_pool_indices"][0]
    for token, loc in zip(case["top_k_tokens"][0, :2048], after["top_k_device_locs"][0, :2048], strict=True):
        source = case["host_cache_locs"][rid, token]
        assert np.array_equal(get_token(after["device_buffer"], loc), get_token(case["host_cache"], source))


def test_F04_the_output_is_defined_whatever_it_held(place, rng):
    rows = [(3, [0, -1], None), (40, [0, 5], {}), (0, [1, 0], None), (0, [0, 0], None)]
    case = block_case(rng, rows, 4, 16, num_real_reqs=2)
    case["top_k_device_locs"][:] = 123_456
    case.plain["top_k_device_locs"][:] = 123_456
    out = check_blocks(place, case)["top_k_device_locs"][:, :8]
    assert (out[0, :3] >= 0).all() and (out[0, 3:] == -1).all()
    assert (out[1] >= 0).all() and (out[1] != 123_456).all() and (out[2:] == -1).all()


def test_F06_a_block_that_stands_twice_is_copied_once(place, rng):
    case = block_case(rng, [(40, [3, 3, 1], {2: 7})], 2, 8)
    rid = case["req_pool_indices"][0]
    after = check_blocks(place, case)
    out = after["top_k_device_locs"][0, :6].tolist()
    assert out[:2] == out[2:4]
    held = after["device_buffer_tokens"][rid, :8]
    assert sorted(held[held >= 0].tolist()) == [2, 3, 6, 7]


def test_F07_the_newest_token_twice(place, rng):
    case = block_case(rng, [(20, [9, 9, 1], {})], 2, 8)
    rid = case["req_pool_indices"][0]
    after = check_blocks(place, case)
    newest = case["device_buffer_locs"][rid, 8]
    assert after["top_k_device_locs"][0, [1, 3]].tolist() == [newest, newest]
    assert (after["device_buffer_tokens"][rid, :8] >= 0).sum() == 3  # 18, 2 and 3


def test_F10_more_entries_than_slots(rng):
    case = block_case(rng, [(64, [0, 1, 2, 3], {})], 2, 8)
    arguments = {name: array.view for name, array in case.arrays.items()} | case.sizes
    with pytest.raises(ValueError, match=r"hot_buffer_size: expected at least .* = 4 \* 2, got 7"):
        hisparse.load_blocks_to_device_buffer_mha(**arguments | {"hot_buffer_size": 7})


def test_F11_slot_32767_and_no_further(cpu_place, rng):
    hot = 32768
    resident = np.full(hot, -1)
    resident[hot - 1] = 5
    case = dsv4_case(rng, [Row(hot + 10, [5, 7], resident)], num_top_k=2, hot_buffer_size=hot)
    after = check_dsv4(cpu_place, case, block_size=1024)
    rid = case["req_pool_indices"][0]
    assert after["top_k_device_locs"][0, 0] == case["device_buffer_locs"][rid, hot - 1]


@pytest.mark.parametrize("block_size", [1024, 960])
def test_F12_block_sizes(place, rng, block_size):
    check_plan(place, *plan_case(rng, [3, 8, 1]), block_size=block_size)
    arrays, sizes = plan_case(rng, [3])
    with pytest.raises(ValueError, match="block_size"):
        call(place, hisparse.copy_cache_planned_mla, arrays, **sizes, block_size=1000)


@pytest.mark.parametrize("lead", [0, 8])
def test_F17_alignment_is_of_item_and_base(place, rng, lead):
    """584 bytes: pages at 8 bytes, and rows of that size in a plan."""
    row = Row(90, [3, 1, 2, 0], {})
    check_dsv4(place, dsv4_case(rng, [row], (lead, lead), num_top_k=4, hot_buffer_size=8))
    check_plan(place, *plan_case(rng, [4], item_size_bytes=584, leads=(lead, lead)))
    check_plan(place, *plan_case(rng, [4], item_size_bytes=24, leads=(0, lead)))


def test_F28_one_rule_for_indices_on_another_device():
    """What a transfer reads is where its address tables are; tests/test_family_drivers.py has the GPU's side."""
    pool = np.zeros((1, 37_440), np.uint8)
    table = np.array([kvcacheio.get_device_accessible_ptr(pool, 0)], np.uint64)
    for wrong in ([0, 1], np.array([0, 1], np.int32), np.array([[0, 1]])):
        with pytest.raises((TypeError, ValueError), match="src_indices"):
            hisparse.transfer_cache_dsv4_mla(table, table, wrong, np.array([2, 3]))


def test_F31_rows_of_a_wider_table(place, rng):
    def wider(views):
        return views | {"miss_src": views["miss_src"][:, :5], "miss_dst": views["miss_dst"][:, :5]}

    arrays, _ = plan_case(rng, [5, 2, 4])
    actual = call(place, hisparse.copy_cache_planned_mla, arrays, wider, item_size_bytes=24)
    expected = arrays["device_buffer"].copy()
    for b, count in enumerate([5, 2, 4]):
        for i in range(count):
            expected.view[arrays["miss_dst"].view[b, i]] = arrays["host_cache"].view[arrays["miss_src"].view[b, i]]
    assert np.array_equal(actual["device_buffer"].raw, expected.raw)


def test_F34_host_loc_and_device_loc_are_different_spaces(place, rng):
    arrays, sizes = plan_case(rng, [6], dsv4=True, host_rows=200)
    arrays["miss_src"].view[0, :6] = np.arange(6)[::-1] + 190
    arrays["miss_dst"].view[0, :6] = np.arange(6)
    after = check_plan(place, arrays, sizes)
    for i in range(6):
        assert np.array_equal(get_token(after["device_buffer"].view, i), get_token(arrays["host_cache"].view, 195 - i))


def test_F35_stale_tokens_of_a_row_that_grew(place, rng):
    garbage = np.full(16, 0x7F7F7F7F)
    garbage[:8] = -1
    case = block_case(rng, [(20, [0, 1, 4], garbage)], 4, 16)
    check_blocks(place, case)


def test_a_page_that_two_requests_share(place, rng):
    """Tokens of two requests lie in turns in one page: each writes its own bytes only."""
    rows = [Row(60, range(20), {}), Row(60, range(20, 40), {})]
    case = dsv4_case(rng, rows, num_top_k=20, hot_buffer_size=20, host_rows=64)
    locs = rng.permutation(42)
    for b in range(2):
        rid = case["req_pool_indices"][b]
        case["device_buffer_locs"][rid, :21] = locs[b::2]
    for loc in range(len(case.plain["device_buffer"])):
        put_token(case["device_buffer"], loc, case.plain["device_buffer"][loc])
    assert isinstance(check_dsv4(place, case).arrays["device_buffer"], Guarded)
