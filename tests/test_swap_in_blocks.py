"""load_blocks_to_device_buffer_mha: blocks of tokens, each with a key and a value.

Compared byte for byte with the plain op's reference on the tokens of the blocks; the literal values keep that honest.
"""

from __future__ import annotations

import numpy as np
import pytest
from family_cases import block_case, check_blocks, random_block_row
from places import call

import hisparse


def slots(case, b: int) -> list[int]:
    rid = case["req_pool_indices"][b]
    locs = case["device_buffer_locs"][rid, : case.sizes["hot_buffer_size"] + 1].tolist()
    entries = case["top_k_blocks"].shape[1] * case.sizes["sparse_block_size"]
    return [-1 if loc == -1 else locs.index(loc) for loc in case["top_k_device_locs"][b, :entries]]


def random_case(rng, sparse_block_size, lengths, width=4, hot=None, noise=0.1, **others):
    hot = width * sparse_block_size + 3 if hot is None else hot
    rows = [random_block_row(rng, length, width, sparse_block_size, hot, noise) for length in lengths]
    return block_case(rng, rows, sparse_block_size, hot, **others)


def test_entries_follow_the_order_of_the_blocks(place, rng):
    resident = {0: 8, 1: 9, 2: 1, 3: 5}
    case = block_case(rng, [(50, [4, -1, 0], resident)], 2, 8)
    case["lru_slots"][case["req_pool_indices"][0], :8] = range(8)
    after = check_blocks(place, case)
    assert slots(after, 0) == [0, 1, -1, -1, 3, 2]  # tokens 8, 9, none, none, 0, 1
    tokens = after["device_buffer_tokens"][case["req_pool_indices"][0], :8]
    assert tokens.tolist() == [8, 9, 1, 0, -1, -1, -1, -1]
    lru = after["lru_slots"][case["req_pool_indices"][0], :8]
    assert lru.tolist() == [4, 5, 6, 7, 3, 0, 1, 2]


def test_a_block_that_reaches_past_the_end_has_no_locs_there(place, rng):
    case = block_case(rng, [(30, [7, 8, 1], {})], 4, 16)
    case["lru_slots"][case["req_pool_indices"][0], :16] = range(16)
    after = check_blocks(place, case)
    assert slots(after, 0) == [0, 16, -1, -1, -1, -1, -1, -1, 1, 2, 3, 4]  # 28, 29 (newest), 30 .. 35, 4 .. 7


def test_a_short_row_has_token_p_in_slot_p(place, rng):
    after = check_blocks(place, block_case(rng, [(6, [1, 0, -1], None)], 4, 12))
    assert slots(after, 0) == [4, 5, -1, -1, 0, 1, 2, 3, -1, -1, -1, -1]


def test_keys_and_values_come_from_their_own_pools(place, rng):
    case = block_case(rng, [(50, [3], {})], 2, 4, item_size_bytes=24)
    after = check_blocks(place, case)
    sources = case["host_cache_locs"][case["req_pool_indices"][0], [6, 7]]
    locs = after["top_k_device_locs"][0, :2]
    for pool in ("k", "v"):
        assert np.array_equal(after[f"device_buffer_{pool}"][locs], case[f"host_cache_{pool}"][sources])


@pytest.mark.parametrize("sparse_block_size", [1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 63, 64, 100, 127, 128])
def test_block_sizes(sweep_place, rng, sparse_block_size):
    lengths = [sparse_block_size * 10, sparse_block_size * 4 + 4, 7, sparse_block_size * 20 + 1]
    for noise in (0.0, 0.3):
        check_blocks(sweep_place, random_case(rng, sparse_block_size, lengths, noise=noise, item_size_bytes=8))


def test_every_entry_has_its_token():
    """The division by the block size, at every place of the longest row. The sequence is short, so none is copied."""
    entries = 32_766
    for size in (1, 2, 3, 7, 43, 127, 128, 129, 381, 5461, 32_766):
        blocks = np.arange(entries // size, dtype=np.int32)[None]
        used = blocks.size * size
        locs = np.arange(entries + 2, dtype=np.int32)[None]
        out = np.full((1, used), 77, np.int32)
        arguments = (
            blocks[:, ::-1].copy(),
            np.zeros((1, entries + 2), np.int32),
            np.zeros((1, 4), np.int64),
            locs,
            *(np.zeros((1, 4), np.uint8) for _ in range(4)),
            out,
            np.array([0]),
            np.array([entries + 1]),
            np.arange(entries + 1, dtype=np.int16)[None],
        )
        with hisparse.cpu.options(shared_memory_bytes=1 << 20):
            hisparse.load_blocks_to_device_buffer_mha(*arguments, 4, entries + 1, size, block_size=1024)
        expected = np.arange(used).reshape(-1, size)[::-1].reshape(-1)
        assert np.array_equal(out[0], expected), size


@pytest.mark.parametrize("item_size_bytes", [1, 7, 8, 24, 128, 512, 576, 1028])
@pytest.mark.parametrize("leads", [(0, 0, 0, 0), (0, 8, 0, 0), (0, 0, 0, 4), (0, 0, 1, 0), (8, 8, 8, 8)], ids=str)
def test_item_sizes_at_every_kind_of_misalignment(sweep_place, rng, item_size_bytes, leads):
    """Words are as wide as all four pools allow."""
    check_blocks(sweep_place, random_case(rng, 4, [90, 40], item_size_bytes=item_size_bytes, leads=leads))


def test_places_everywhere(place, rng):
    for size in (1, 3, 16):
        check_blocks(place, random_case(rng, size, [200, 65, 3], item_size_bytes=132, num_real_reqs=2))


@pytest.mark.parametrize("blocks_per_request", [1, 2, 5])
@pytest.mark.parametrize("block_size", [64, 256, 1024])
def test_blocks_and_parts(sweep_place, rng, blocks_per_request, block_size):
    case = random_case(rng, 8, [400, 90, 151, 30], 10, num_real_reqs=3)
    check_blocks(sweep_place, case, block_size=block_size, blocks_per_request=blocks_per_request)


@pytest.mark.parametrize(("width", "hot"), [(16, 4096), (4, 8192), (24, 3500)])
def test_every_size_of_the_kernel(sweep_place, rng, width, hot):
    check_blocks(sweep_place, random_case(rng, 128, [hot + 3000], width, hot, item_size_bytes=16), block_size=1024)


def test_skip_io_moves_no_bytes(place, rng):
    case = random_case(rng, 4, [90, 20])
    after = check_blocks(place, case, skip_io=True)
    for name in ("device_buffer_k", "device_buffer_v"):
        assert np.array_equal(case[name], after[name])


def test_the_smaller_of_two_pools_bounds_the_locs(place, rng):
    """A loc that only one of the two pools has is outside: neither key nor value of it is touched."""
    case = block_case(rng, [(50, [0, 1], {})], 2, 4, host_rows=60, stale_host_locs=False)
    rid = case["req_pool_indices"][0]
    case["host_cache_locs"][rid, [0, 1, 2, 3]] = [5, 59, 7, 58]
    case["lru_slots"][rid, :4] = range(4)
    before = case["device_buffer_k"].copy()
    last = len(before) - 1
    case["device_buffer_locs"][rid, :4] = [0, 1, last, 2]

    def cut(views):
        return (
            views
            | {
                "host_cache_v": views["host_cache_v"][:59],  # without row 59
                "device_buffer_k": views["device_buffer_k"][:last],  # without the last row
            }
        )

    after = call(place, hisparse.load_blocks_to_device_buffer_mha, case.arrays, cut, **case.sizes)
    for pool in ("k", "v"):
        got, old = after[f"device_buffer_{pool}"].view, case[f"device_buffer_{pool}"]
        assert np.array_equal(got[[0, 2]], case[f"host_cache_{pool}"][[5, 58]])
        untouched = np.setdiff1d(np.arange(len(old)), [0, 2])
        assert np.array_equal(got[untouched], old[untouched])
    assert after["top_k_device_locs"].view[0, :4].tolist() == [0, 1, last, 2]


def test_tokens_beyond_31_bits_are_none(place, rng):
    case = block_case(rng, [(2**40, [2**31 - 1, 0, 2**30], {})], 3, 16, max_tokens=40)
    after = check_blocks(place, case)
    assert slots(after, 0)[:3] == [-1] * 3 and slots(after, 0)[6:] == [-1] * 3


@pytest.mark.parametrize("seed", range(8))
def test_random_calls(sweep_place, seed):
    rng = np.random.default_rng(seed)
    for _ in range(3):
        size, width = int(rng.integers(1, 20)), int(rng.integers(1, 9))
        hot = size * width + int(rng.integers(0, 40))
        lengths = rng.integers(0, 3 * hot + 2, int(rng.integers(1, 5))).tolist()
        case = random_case(
            rng, size, lengths, width, hot, noise=0.2, item_size_bytes=int(rng.choice([4, 20, 128])), page_size=2
        )
        check_blocks(sweep_place, case, block_size=int(rng.choice([64, 256, 512])))
