"""copy_cache_planned_mla: a miss plan replayed on another layer's pools."""

from __future__ import annotations

import numpy as np
import pytest
from family_cases import check_dsv4, copy_planned, dsv4_case, paged, random_pages
from places import Guarded, assert_same, call
from swap_in_cases import check, make_case, random_row

import hisparse

ITEM_SIZES = (8, 512, 576, 584, 656, 1152)


def plan_case(rng, counts, width=8, item_size_bytes=24, num_real_reqs=None, dsv4=False, leads=(0, 0), host_rows=None):
    """Every target stands once in the plan, the entries behind the counts included."""
    batch = len(counts)
    rows = batch * width + 5
    host_rows = rows + 20 if host_rows is None else host_rows
    targets = rng.permutation(rows)[: batch * width].reshape(batch, width)
    gap = int(rng.integers(3))
    arrays = {
        "miss_src": Guarded.of(rng, rng.integers(0, host_rows, (batch, width)), np.int64, gap=gap),
        "miss_dst": Guarded.of(rng, targets, np.int32, lead=4, gap=gap),
        "miss_count": Guarded.of(rng, counts, np.int32, lead=4),
        "num_real_reqs": Guarded.of(rng, [batch if num_real_reqs is None else num_real_reqs], np.int32),
    }
    sizes = {"item_size_bytes": 584 if dsv4 else item_size_bytes, "is_dsv4_layout": dsv4}
    for name, count, lead in (("host_cache", host_rows, leads[0]), ("device_buffer", rows, leads[1])):
        shape = (count, item_size_bytes)
        arrays[name] = random_pages(rng, count, lead) if dsv4 else Guarded.random(rng, np.uint8, shape, lead=lead)
    return arrays, sizes


def check_plan(place, arrays, sizes, prepare=None, **options):
    expected = {name: array.copy() for name, array in arrays.items()}
    copy_planned(**{name: array.view for name, array in expected.items()}, **sizes, **options)
    actual = call(place, hisparse.copy_cache_planned_mla, arrays, prepare, **sizes, **options)
    assert_same(actual, expected)
    return actual


def changed_rows(arrays, after) -> int:
    return int((arrays["device_buffer"].view != after["device_buffer"].view).any(axis=1).sum())


@pytest.mark.parametrize("item_size_bytes", ITEM_SIZES)
def test_item_sizes(place, rng, item_size_bytes):
    arrays, sizes = plan_case(rng, [3, 0, 8, 1, 5], item_size_bytes=item_size_bytes)
    assert changed_rows(arrays, check_plan(place, arrays, sizes)) == 17


@pytest.mark.parametrize("item_size_bytes", [1, 7, 20, 512, 584, 1028])
@pytest.mark.parametrize("leads", [(0, 0), (8, 0), (0, 4), (2, 2), (1, 0)], ids=str)
def test_alignments(sweep_place, rng, item_size_bytes, leads):
    check_plan(sweep_place, *plan_case(rng, [3, 8, 1], item_size_bytes=item_size_bytes, leads=leads))


@pytest.mark.parametrize("leads", [(0, 0), (8, 0), (0, 8), (8, 8)], ids=str)
def test_deepseek_v4_pages(place, rng, leads):
    check_plan(place, *plan_case(rng, [3, 0, 40, 1, 25], width=40, dsv4=True, leads=leads))


@pytest.mark.parametrize("num_real_reqs", [0, 1, 3, 4, 5, 2**31 - 1, -1, -(2**31)])
def test_rows_from_num_real_reqs_on_are_ignored(place, rng, num_real_reqs):
    arrays, sizes = plan_case(rng, [3, 2, 8, 5], num_real_reqs=num_real_reqs)
    after = check_plan(place, arrays, sizes)
    assert changed_rows(arrays, after) == sum([3, 2, 8, 5][: max(num_real_reqs, 0)])


@pytest.mark.parametrize("num_real_reqs", [0, 1, 2])
def test_a_batch_of_one(place, rng, num_real_reqs):
    arrays, sizes = plan_case(rng, [5], num_real_reqs=num_real_reqs)
    assert changed_rows(arrays, check_plan(place, arrays, sizes)) == 5 * min(num_real_reqs, 1)


def test_stale_counts_and_locs_of_padded_rows(place, rng):
    arrays, sizes = plan_case(rng, [3, 2, 2**31 - 1, -5], num_real_reqs=2)
    arrays["miss_src"].view[2:], arrays["miss_dst"].view[2:] = -(2**60), 2**31 - 1
    check_plan(place, arrays, sizes)


@pytest.mark.parametrize("count", [9, 2**31 - 1, -1, -(2**31)])
def test_a_count_is_no_more_than_the_plan_is_wide(place, rng, count):
    arrays, sizes = plan_case(rng, [2, count, 3])
    after = check_plan(place, arrays, sizes)
    assert changed_rows(arrays, after) == 5 + (8 if count > 0 else 0)
    alone, sizes = plan_case(rng, [count])
    check_plan(place, alone, sizes)


def test_locs_outside_the_pools_are_skipped(place, rng):
    for dsv4 in (False, True):
        arrays, sizes = plan_case(rng, [8, 8], dsv4=dsv4, host_rows=64)
        arrays["miss_src"].view[0, :6] = [-1, 64, 2**40, -(2**63), 2**32, 63]
        arrays["miss_dst"].view[1, :4] = [-1, 64 if dsv4 else 21, 2**31 - 1, -(2**31)]
        check_plan(place, arrays, sizes)


@pytest.mark.parametrize("batch", [2, 3, 31, 32, 33, 63, 64, 65, 100, 127, 129, 200, 1000])
@pytest.mark.parametrize("block_size", [64, 1024])
def test_batches(sweep_place, rng, batch, block_size):
    """More rows than threads among them, rows without items between others, and first and last rows without."""
    for counts in (rng.integers(0, 4, batch), rng.integers(0, 2, batch) * 3, np.eye(1, batch, batch - 1, int)[0] * 2):
        arrays, sizes = plan_case(rng, counts, width=3, item_size_bytes=8, num_real_reqs=int(batch - batch // 5))
        check_plan(sweep_place, arrays, sizes, block_size=block_size)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 16, 33])
def test_grids(sweep_place, rng, num_blocks):
    for block_size in (64, 192, 1024):
        for dsv4 in (False, True):
            arrays, sizes = plan_case(rng, [40, 0, 3, 17], width=40, item_size_bytes=72, dsv4=dsv4)
            check_plan(sweep_place, arrays, sizes, num_blocks=num_blocks, block_size=block_size)


def test_more_items_than_a_tile_for_each_warp(place, rng):
    check_plan(place, *plan_case(rng, [300, 290, 1], width=300, item_size_bytes=8), num_blocks=1, block_size=64)


@pytest.mark.parametrize("width", [1, 6, 31, 64, 65, 300])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8])
def test_few_rows(sweep_place, rng, batch, width):
    """With more and fewer lanes of a warp than a row has entries for it, full rows and empty ones among them."""
    for num_blocks, block_size in ((1, 64), (2, 64), (3, 192), (16, 128), (5, 1024)):
        counts = rng.choice([0, 1, width // 2, width - 1, width, width + 1], batch)
        arrays, sizes = plan_case(rng, counts, width, 16, num_real_reqs=int(rng.integers(1, batch + 2)))
        check_plan(sweep_place, arrays, sizes, num_blocks=num_blocks, block_size=block_size)


def test_skip_io_copies_nothing(place, rng):
    arrays, sizes = plan_case(rng, [3, 8])
    assert changed_rows(arrays, check_plan(place, arrays, sizes, skip_io=True)) == 0


def test_an_empty_plan(place, rng):
    check_plan(place, *plan_case(rng, [0, 0, 0]))
    arrays, sizes = plan_case(rng, [2, 3])
    for name in ("miss_src", "miss_dst", "miss_count"):
        arrays[name] = Guarded.of(rng, arrays[name].view[:0])
    check_plan(place, arrays, sizes)


def test_columns_that_only_one_of_the_two_has(place, rng):
    arrays, sizes = plan_case(rng, [8, 3, 8])
    stride = arrays["miss_src"].strides[0]
    arrays["miss_dst"] = Guarded.random(rng, np.int32, (3, 5), stride)
    arrays["miss_dst"].view[:] = rng.permutation(15).reshape(3, 5)
    check_plan(place, arrays, sizes)


def test_it_replays_what_a_swap_in_recorded(place, rng):
    rows = [random_row(rng, length, 20, 32, 0.5) for length in (90, 20, 300, 40)]
    case = make_case(rng, rows, num_top_k=20, hot_buffer_size=32, item_size_bytes=132, num_real_reqs=3)
    before = case["device_buffer"].copy()
    after = check(place, case)
    arrays = {name: after.arrays[name] for name in ("miss_src", "miss_dst", "miss_count", "num_real_reqs")}
    arrays |= {name: case.arrays[name] for name in ("host_cache", "device_buffer")}
    replayed = check_plan(place, arrays, {"item_size_bytes": 132})
    assert np.array_equal(replayed["device_buffer"].view, after["device_buffer"])
    assert not np.array_equal(before, after["device_buffer"])


def test_it_replays_what_a_swap_in_of_pages_recorded(place, rng):
    rows = [random_row(rng, length, 20, 32, 0.5) for length in (90, 20, 300)]
    case = dsv4_case(rng, rows, num_top_k=20, hot_buffer_size=32)
    after = check_dsv4(place, case)
    other_layer = rng.integers(0, 256, case.plain["host_cache"].shape, np.uint8)
    arrays = {name: after.arrays[name] for name in ("miss_src", "miss_dst", "miss_count")}
    arrays["num_real_reqs"] = Guarded.of(rng, [3], np.int32)
    arrays |= {"host_cache": paged(rng, other_layer), "device_buffer": case.arrays["device_buffer"]}
    check_plan(place, arrays, {"item_size_bytes": 584, "is_dsv4_layout": True})


@pytest.mark.parametrize("item_size_bytes", ITEM_SIZES)
def test_B100_with_two_misses_each(sweep_place, rng, item_size_bytes):
    dsv4 = item_size_bytes == 584
    arrays, sizes = plan_case(rng, [2] * 100, width=4, item_size_bytes=item_size_bytes, dsv4=dsv4)
    check_plan(sweep_place, arrays, sizes, num_blocks=16)
