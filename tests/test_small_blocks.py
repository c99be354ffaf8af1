"""Every kernel in blocks of a few warps, where one still waits for another: what ThreadSanitizer runs on."""

from __future__ import annotations

import numpy as np
import pytest
from fuzz_family import BlockSwapIn, Dsv4SwapIn, Dsv4Transfer, PlannedCopy
from kvcacheio_cases import HEAD_OPS, OPS, Shape
from kvcacheio_cases import check as check_transfer
from kvcacheio_cases import make_case as make_transfer
from swap_in_cases import check, make_case, random_row
from test_copy_items import check_copy, copy_case

WARPS = (1, 2, 3)


@pytest.mark.parametrize("hot_buffer_size", [20, 250, 500, 900])  # few enough for registers, and too many
@pytest.mark.parametrize("blocks_per_request", [1, 3])
def test_swap_in(place, rng, hot_buffer_size, blocks_per_request):
    warp_size = place.warp_size or 32
    num_top_k = hot_buffer_size * 3 // 5
    lengths = (hot_buffer_size + 60, hot_buffer_size, 2 * hot_buffer_size)
    for warps in WARPS:
        rows = [random_row(rng, length, num_top_k, hot_buffer_size, 0.6) for length in lengths]
        case = make_case(rng, rows, num_top_k=num_top_k, hot_buffer_size=hot_buffer_size, item_size_bytes=24)
        check(place, case, block_size=warps * warp_size, blocks_per_request=blocks_per_request)


@pytest.mark.parametrize("op", OPS)
def test_transfers_of_more_tiles_than_warps(place, rng, op):
    shape = Shape(48, num_layers=3, head_num=2 if op in HEAD_OPS else 1, page_size=4, tokens=400)
    for warps in WARPS[:2]:
        case = make_transfer(rng, op, shape, 390)
        check_transfer(rng, place, case, block_quota=2, num_warps_per_block=warps)


@pytest.mark.parametrize("item_size_bytes", [20, 528, 1040])
def test_copy(place, rng, item_size_bytes):
    check_copy(place, copy_case(rng, item_size_bytes, 40), item_size_bytes)


@pytest.mark.parametrize("seed", range(2))
def test_pages_and_blocks(place, seed):
    warp_size = place.warp_size or 32
    shape = {"num_real_reqs": None}
    for warps, blocks in ((1, 2), (3, 1)):
        options = {"block_size": warps * warp_size, "blocks_per_request": blocks}
        Dsv4SwapIn(seed, 90, 50, (30, -5, 200), 0.5, shape, options).check(place)
        BlockSwapIn(seed, 5, 9, 7, (30, -5, 90), 0.1, shape, {"block_size": warps * warp_size}).check(place)


@pytest.mark.parametrize("seed", range(2))
def test_copies_of_more_tiles_than_warps(place, seed):
    for warps in WARPS:
        options = {"block_size": warps * (place.warp_size or 32)}
        plan = {"item_size_bytes": 24, "dsv4": bool(seed)}
        PlannedCopy(seed, (40, 3, 0, 39, 40), 40, plan, options | {"num_blocks": 2}).check(place)
        Dsv4Transfer(seed, 3, (300, 200), 190, (0, 8), options).check(place)


def test_there_is_more_than_one_row_of_slots_per_thread(rng):
    """The three sizes of the swap-in kernel are all run above, with 64 threads and with 32."""
    slots = [-(-hot // threads) for hot in (20, 250, 500, 900) for threads in (32, 64)]
    assert np.any(np.array(slots) <= 4) and np.any((np.array(slots) > 4) & (np.array(slots) <= 8)) and max(slots) > 8
