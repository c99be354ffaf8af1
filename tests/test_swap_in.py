"""load_cache_to_device_buffer_mla, one rule of its contract at a time, with the values that the rule gives.

`check` compares every byte with the reference; the literal values in these tests keep the reference honest.
Slots, as in `SwapInCase.slots`, are the slots of the row's request, with hot_buffer_size for the newest token's.
"""

from __future__ import annotations

import numpy as np
import pytest
from places import torch
from swap_in_cases import PLAN, Row, check, make_case, random_row, run

import hisparse


def small_case(rng, *rows, hot=8, num_top_k=6, **others):
    return make_case(rng, rows, num_top_k=num_top_k, hot_buffer_size=hot, **others)


# Padding


@pytest.mark.parametrize(("num_real_reqs", "real"), [(2, 2), (0, 0), (-1, 0), (-(2**31), 0), (3, 3), (2**31 - 1, 3)])
def test_rows_from_num_real_reqs_on_are_padding(place, rng, num_real_reqs, real):
    rows = [Row(3, [0, 1, 2]), Row(40, [1, 30, 31]), Row(20, [5, 5, 19])]
    after = check(place, small_case(rng, *rows, num_real_reqs=num_real_reqs))
    assert (after["top_k_device_locs"][real:, :6] == -1).all()
    assert [after.slots(b)[0] >= 0 for b in range(real)] == [True] * real


def test_without_num_real_reqs_every_row_is_real(place, rng):
    after = check(place, small_case(rng, Row(3, [0, 1, 2]), Row(40, [1, 30, 39])))
    assert after.slots(0) == [0, 1, 2, -1, -1, -1] and after.slots(1)[2] == 8


def test_a_padding_row_that_names_a_request_in_use_leaves_it_alone(place, rng):
    case = small_case(rng, Row(40, [1, 30]), Row(40, [2, 35]), num_real_reqs=1)
    case["req_pool_indices"][1], case["seq_lens"][1] = case["req_pool_indices"][0], 40
    check(place, case)


# Short sequences


def test_a_short_row_has_token_p_in_slot_p_wherever_the_entry_stands(place, rng):
    after = check(place, small_case(rng, Row(5, [-1, 4, 0, 5, 2, 7])))
    assert after.slots(0) == [-1, 4, 0, -1, 2, -1]
    assert after.misses(0) == 0


def test_a_short_row_ignores_the_tables_and_keeps_them(place, rng):
    case = small_case(rng, Row(5, [4, 1, 3, 4], resident=np.arange(8)[::-1] * 7))
    after = check(place, case)
    assert after.slots(0) == [4, 1, 3, 4, -1, -1]


@pytest.mark.parametrize("seq_len", [0, -1, -7, 1, 7, 8])
def test_lengths_up_to_the_hot_buffer_are_short(place, rng, seq_len):
    after = check(place, small_case(rng, Row(seq_len, [0, 6, 7, 8, seq_len - 1, -1])))
    assert after.slots(0) == [p if 0 <= p < seq_len else -1 for p in (0, 6, 7, 8, seq_len - 1, -1)]


def test_one_token_more_than_the_hot_buffer_is_long(place, rng):
    after = check(place, small_case(rng, Row(9, [8, 7, 0, 9], lru=range(8))))
    assert after.slots(0) == [8, 7, 0, -1, -1, -1]
    assert after.lru(0) == [1, 2, 3, 4, 5, 6, 0, 7]


# Long sequences


def test_misses_take_the_least_recently_used_slots_in_row_order(place, rng):
    resident = {0: 10, 1: 11, 2: 12, 3: 13, 4: 14, 5: 15, 6: 16, 7: 17}
    row = Row(50, [30, 13, 31, 15, 32], resident, lru=[5, 2, 3, 7, 0, 6, 1, 4])
    after = check(place, small_case(rng, row))
    assert after.slots(0) == [2, 3, 7, 5, 0, -1]
    assert after.tokens(0).tolist() == [32, 11, 30, 13, 14, 15, 16, 31]
    assert after.lru(0) == [6, 1, 4, 2, 7, 0, 5, 3]
    assert after.misses(0) == 3


def test_hits_alone_change_nothing_but_the_order(place, rng):
    row = Row(50, [14, 12, 17], {s: 10 + s for s in range(8)}, lru=[7, 6, 5, 4, 3, 2, 1, 0])
    after = check(place, small_case(rng, row))
    assert after.slots(0) == [4, 2, 7, -1, -1, -1]
    assert after.lru(0) == [6, 5, 3, 1, 0, 7, 4, 2]
    assert after.misses(0) == 0


def test_misses_alone_in_an_empty_buffer(place, rng):
    after = check(place, small_case(rng, Row(50, [9, 3, 48, 0, 7, 8], {}, lru=[3, 1, 2, 0, 7, 5, 6, 4])))
    assert after.slots(0) == [3, 1, 2, 0, 7, 5]
    assert after.lru(0) == [6, 4, 3, 1, 2, 0, 7, 5]


def test_all_entries_unused_changes_nothing(place, rng):
    case = small_case(rng, Row(50, []))
    after = check(place, case)
    assert after.slots(0) == [-1] * 6 and after.lru(0) == case.lru(0) and after.misses(0) == 0


def test_entries_outside_the_sequence_use_no_slot(place, rng):
    row = Row(30, [30, -2, 2**31 - 1, 28, -(2**31), 31], {0: 5, 1: 30, 2: 31}, lru=range(8))
    after = check(place, small_case(rng, row))
    assert after.slots(0) == [-1, -1, -1, 0, -1, -1]
    assert after.misses(0) == 1


def test_the_newest_token_is_in_the_slot_behind_the_lru(place, rng):
    case = small_case(rng, Row(30, [29, 4, 29], {3: 4}, lru=range(8)))
    after = check(place, case)
    assert after.slots(0) == [8, 3, 8, -1, -1, -1]
    assert after.lru(0) == [0, 1, 2, 4, 5, 6, 7, 3]
    assert after.misses(0) == 0


def test_a_slot_that_holds_the_newest_token_is_no_hit(place, rng):
    row = Row(30, [29, 5], {0: 29, 1: 1, 2: 2}, lru=range(8))
    after = check(place, small_case(rng, row))
    assert after.slots(0)[:2] == [8, 0]
    assert after.tokens(0)[0] == 5
    assert after.lru(0) == [1, 2, 3, 4, 5, 6, 7, 0]


def test_the_newest_token_stays_in_a_slot_that_is_not_evicted(place, rng):
    row = Row(30, [29, 5], {4: 29}, lru=range(8))
    after = check(place, small_case(rng, row))
    assert after.tokens(0).tolist() == [5, -1, -1, -1, 29, -1, -1, -1]
    assert after.lru(0) == [1, 2, 3, 4, 5, 6, 7, 0]


def test_a_repeated_token_has_one_slot_and_is_copied_once(place, rng):
    row = Row(30, [7, 3, 7, 3, 29, 7], {5: 3}, lru=[5, 6, 7, 0, 1, 2, 3, 4])
    after = check(place, small_case(rng, row))
    assert after.slots(0) == [6, 5, 6, 5, 8, 6]
    assert after.misses(0) == 1


def test_the_first_place_of_a_repeated_token_gives_its_order(place, rng):
    row = Row(30, [9, 8, 7, 8, 9, 6], {}, lru=range(8))
    after = check(place, small_case(rng, row))
    assert after.slots(0) == [0, 1, 2, 1, 0, 3]
    assert after.lru(0) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_tokens_outside_the_sequence_in_the_table_are_evicted_like_any_other(place, rng):
    resident = {0: 2**31 - 1, 1: -(2**31), 2: -5, 3: 30, 4: 31, 5: 1}
    after = check(place, small_case(rng, Row(30, [1, 2, 3, 4, 5, 6], resident, lru=range(8))))
    assert after.tokens(0).tolist() == [2, 3, 4, 5, 6, 1, -1, -1]


@pytest.mark.parametrize("hits", [0, 3, 7, 8])
def test_as_many_entries_as_slots(place, rng, hits):
    entries = np.concatenate([100 + np.arange(hits), 10 + np.arange(8 - hits)])
    after = check(place, small_case(rng, Row(150, rng.permutation(entries), 100 + np.arange(8)), num_top_k=8))
    assert sorted(after.slots(0)) == list(range(8))


def test_one_entry_and_one_slot(place, rng):
    for entry, slot in ((3, 0), (4, 0), (5, 1), (-1, -1), (6, -1)):
        after = check(place, small_case(rng, Row(6, [entry], {0: 3}), hot=1, num_top_k=1, spare_requests=0))
        assert after.slots(0) == [slot]


@pytest.mark.parametrize("page_size", [1, 2, 3, 64])
def test_the_newest_slot_is_the_first_of_its_page(place, rng, page_size):
    after = check(place, small_case(rng, Row(30, [29, 3]), page_size=page_size))
    assert after.slots(0)[:2] == [8, 3]


def test_a_length_of_more_than_32_bits_is_long(place, rng):
    rows = [Row(seq_len, [7, 3, 30], {2: 3}) for seq_len in (2**32 + 5, 2**31, 2**40, 2**63 - 1)]
    after = check(place, small_case(rng, *rows, max_tokens=40))
    assert [after.misses(b) for b in range(4)] == [2] * 4


def test_a_length_below_minus_32_bits_is_empty(place, rng):
    after = check(place, small_case(rng, Row(-(2**32) + 30, [7, 3]), Row(-(2**63), [7, 3]), max_tokens=40))
    assert after.slots(0) == [-1] * 6


# The miss plan


def test_the_plan_names_the_host_and_device_locs_in_miss_order(place, rng):
    case = small_case(rng, Row(30, [9, 29, 4, 8, 9, -1], {1: 4}, lru=[1, 6, 0, 2, 3, 4, 5, 7]))
    after = check(place, case)
    rid = case["req_pool_indices"][0]
    assert after.misses(0) == 2
    assert after["miss_src"][0, :2].tolist() == case["host_cache_locs"][rid, [9, 8]].tolist()
    assert after["miss_dst"][0, :2].tolist() == case["device_buffer_locs"][rid, [6, 0]].tolist()


def test_without_a_plan_the_rest_is_the_same(place, rng):
    case = make_case(rng, [random_row(rng, 90, 20, 32, 0.5)], num_top_k=20, hot_buffer_size=32)
    with_plan = check(place, case)
    for name in PLAN:
        del case.arrays[name]
    without = check(place, case)
    assert np.array_equal(with_plan["top_k_device_locs"], without["top_k_device_locs"])


def test_rows_wider_than_num_top_k_keep_their_further_columns(place, rng):
    rows = [Row(30, range(20)), Row(5, range(20)), random_row(rng, 50, 20, 20), random_row(rng, 50, 20, 20)]
    case = make_case(rng, rows, num_top_k=20, hot_buffer_size=20, num_real_reqs=3)
    case.sizes["num_top_k"] = 7
    after = check(place, case)
    for name in ("top_k_device_locs", "miss_src", "miss_dst"):
        assert np.array_equal(case[name][:, 7:], after[name][:, 7:])


@pytest.mark.parametrize("plan", [True, False])
def test_skip_io_plans_and_moves_no_bytes(place, rng, plan):
    rows = [random_row(rng, 90, 20, 32, 0.5), random_row(rng, 20, 20, 32)]
    case = make_case(rng, rows, num_top_k=20, hot_buffer_size=32, plan=plan)
    after = check(place, case, skip_io=True)
    assert np.array_equal(case["device_buffer"], after["device_buffer"])
    assert not np.array_equal(case.tokens(0), after.tokens(0))


# The call


@pytest.mark.parametrize("rid_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("seq_dtype", [np.int32, np.int64])
def test_index_dtypes_are_independent(place, rng, rid_dtype, seq_dtype):
    rows = [random_row(rng, seq_len, 20, 32) for seq_len in (90, 20, 40)]
    check(place, make_case(rng, rows, num_top_k=20, hot_buffer_size=32, index_dtypes=(rid_dtype, seq_dtype)))


def test_an_empty_batch_changes_nothing(place, rng):
    for num_real_reqs in (None, 0, 3):
        case = make_case(rng, [], num_top_k=4, hot_buffer_size=8, num_real_reqs=num_real_reqs)
        after = run(place, case)
        assert all(np.array_equal(case.arrays[name].raw, after.arrays[name].raw) for name in case.arrays)


def test_arguments_by_position(place, rng):
    case = small_case(rng, Row(30, [9, 29, 4]), Row(30, [8, 2]), page_size=2, num_real_reqs=1)
    tables = ("top_k_tokens", "device_buffer_tokens", "host_cache_locs", "device_buffer_locs")
    pools = ("host_cache", "device_buffer", "top_k_device_locs", "req_pool_indices", "seq_lens", "lru_slots")
    sizes = ("item_size_bytes", "num_top_k", "hot_buffer_size", "page_size", "block_size")
    order = (*tables, *pools, *sizes, "num_real_reqs", "miss_src", "miss_dst", "miss_count", "skip_io")
    views = {name: place.put(name, array)[1] for name, array in case.arrays.items()}
    arguments = views | case.sizes | {"block_size": 256, "skip_io": False}
    with place.options():
        assert hisparse.load_cache_to_device_buffer_mla(*(arguments[name] for name in order)) is None
    expected = check(place, case)
    for name in ("top_k_device_locs", "lru_slots", "miss_count", "device_buffer"):
        got = views[name] if place.library == "numpy" else views[name].cpu().numpy()
        assert np.array_equal(got, expected[name])


def test_optional_arguments_may_be_none(place, rng):
    case = small_case(rng, Row(30, [9, 29, 4]), plan=False)
    check(place, case, num_real_reqs=None, miss_src=None, miss_dst=None, miss_count=None, blocks_per_request=None)


def test_pools_of_any_dtype_and_shape(place, rng):
    def reshaped(views):
        host, device = views["host_cache"], views["device_buffer"]
        host = host.view("float32" if place.library == "numpy" else torch.bfloat16)
        return views | {"host_cache": host.reshape(len(host), 2, 1, -1), "device_buffer": device.reshape(-1)}

    rows = [random_row(rng, 90, 20, 32, 0.5), random_row(rng, 90, 20, 32, 0.2)]
    check(place, make_case(rng, rows, num_top_k=20, hot_buffer_size=32, item_size_bytes=48), reshaped)


def test_the_host_cache_may_lie_in_device_memory(place, rng):
    rows = [random_row(rng, 90, 20, 32, 0.5)]

    def on_device(views):
        if place.library == "torch":
            views["host_cache"] = views["host_cache"].to(views["device_buffer"].device)
        return views

    check(place, make_case(rng, rows, num_top_k=20, hot_buffer_size=32), on_device)
