"""load_cache_to_device_buffer_mla over sizes: items, buffers, blocks, batches, and what fits into shared memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from places import assert_same, torch
from swap_in_cases import Row, check, make_case, random_row, run, without_stale_plan

import hisparse

ITEM_SIZES = (1, 2, 3, 7, 8, 16, 20, 24, 132, 144, 512, 576, 584, 656, 1028, 1152, 2048)


def sized_case(rng, num_top_k, hot_buffer_size, seq_lens, hit_rate=0.7, noise=0.1, **others):
    rows = [random_row(rng, seq_len, num_top_k, hot_buffer_size, hit_rate, noise) for seq_len in seq_lens]
    return make_case(rng, rows, num_top_k=num_top_k, hot_buffer_size=hot_buffer_size, **others)


# Items


@pytest.mark.parametrize("item_size_bytes", ITEM_SIZES)
def test_item_sizes_at_every_kind_of_misalignment(sweep_place, rng, item_size_bytes):
    for leads in ((0, 0), (8, 0), (0, 4), (2, 2), (1, 0), (5, 15)):
        check(
            sweep_place,
            sized_case(rng, 12, 16, [40, 300], 0.5, item_size_bytes=item_size_bytes, pool_leads=leads),
        )


@pytest.mark.parametrize("item_size_bytes", [1, 20, 576, 584, 656, 1024, 1152])
def test_item_sizes_everywhere(place, rng, item_size_bytes):
    check(place, sized_case(rng, 40, 64, [200, 64, 65], 0.3, item_size_bytes=item_size_bytes))


# Buffers


@pytest.mark.parametrize("hot_buffer_size", [*range(1, 40), 63, 64, 65, 127, 129, 255, 257, 1023, 1025])
def test_hot_buffers_of_any_length(sweep_place, rng, hot_buffer_size):
    """Lengths that no vector width divides, and with them rows of the tables at odd addresses."""
    for num_top_k in {1, (hot_buffer_size + 1) // 2, hot_buffer_size}:
        lengths = [hot_buffer_size + extra for extra in (1, 2, 50)] + [hot_buffer_size, max(hot_buffer_size - 1, 0)]
        check(sweep_place, sized_case(rng, num_top_k, hot_buffer_size, lengths, 0.5, item_size_bytes=4))


@pytest.mark.parametrize("num_top_k", [15, 16, 17, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049])
@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 1.0])
def test_entry_counts_around_powers_of_two(sweep_place, rng, num_top_k, hit_rate):
    """With every entry another token, a table of tokens is as full as it gets."""
    row = random_row(rng, num_top_k * 2 + 50, num_top_k, num_top_k, hit_rate, noise=0)
    check(sweep_place, make_case(rng, [row], num_top_k=num_top_k, hot_buffer_size=num_top_k, item_size_bytes=8))


@pytest.mark.parametrize("stride", [2, 64, 1024, 4096, 12_288, 65_536])
@pytest.mark.parametrize("ascending", [True, False])
def test_tokens_that_a_weak_hash_throws_together(sweep_place, rng, stride, ascending):
    count = min(512, 2**22 // stride)
    tokens = np.arange(count) * stride
    held = tokens[rng.permutation(count)[: count // 2]]
    resident = dict(zip(rng.permutation(count)[: len(held)].tolist(), held.tolist(), strict=True))
    row = Row(count * stride + 2, tokens if ascending else tokens[::-1], resident)
    sizes = {"num_top_k": count, "hot_buffer_size": count, "item_size_bytes": 8}
    check(sweep_place, make_case(rng, [row], host_rows=999, spare_requests=0, **sizes))


@pytest.mark.parametrize("staged", [False, True])
def test_tokens_that_share_a_cell_of_the_table(sweep_place, rng, staged):
    """A table with fewer cells than the sequence has tokens: those that hash to one cell are chained, however many."""
    seq_len = 1 << 22
    hashes = np.arange(seq_len - 1, dtype=np.uint64) * 0x9E3779B1 % 2**32
    together = np.flatnonzero(hashes < 2**32 // 100_000)
    assert len(together) > 32
    entries = rng.permutation(np.concatenate([together, together[::2], together[:5], rng.integers(0, seq_len, 20)]))
    hot = 256
    held = rng.permutation(
        np.concatenate([together[::3], np.setdiff1d(np.flatnonzero(hashes % 99_991 == 7), together)])
    )
    slots = rng.permutation(hot)[: len(held[:hot])]
    row = Row(seq_len, entries, dict(zip(slots.tolist(), held[:hot].tolist(), strict=True)))
    case = make_case(
        rng, [row], num_top_k=len(entries), hot_buffer_size=hot, item_size_bytes=8, host_rows=999, spare_requests=0
    )
    check(sweep_place, case, block_size=64 if staged else 256)


@pytest.mark.parametrize("hot_buffer_size", [2048, 4096, 6144, 8192, 8191, 16384, 32768])
def test_2048_entries(sweep_place, rng, hot_buffer_size):
    if hot_buffer_size > shared_memory_allows(sweep_place):
        pytest.skip("more shared memory than this device has")
    lengths = [hot_buffer_size + 1000, hot_buffer_size + 1]
    check(sweep_place, sized_case(rng, 2048, hot_buffer_size, lengths, 0.8, item_size_bytes=16), block_size=1024)


def shared_memory_allows(place) -> int:
    """The hot_buffer_size that the contract promises at 2048 entries."""
    if place.warp_size is not None:
        return 32768
    properties = torch.cuda.get_device_properties(place.device)
    if torch.version.hip:
        return 32768 if "gfx950" in properties.gcnArchName else 8192
    return 32768 if (properties.major, properties.minor) in ((8, 0), (9, 0), (10, 0)) else 8192


@pytest.mark.parametrize("page_size", [2, 16, 64])
def test_page_sizes(place, rng, page_size):
    check(place, sized_case(rng, 40, 64, [200, 30, 64, 65], page_size=page_size))


# Blocks


@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 960, 1024])
@pytest.mark.parametrize("hot_buffer_size", [48, 2000])
def test_block_sizes(place, rng, block_size, hot_buffer_size):
    lengths = [hot_buffer_size + 500, hot_buffer_size - 1]
    check(place, sized_case(rng, hot_buffer_size * 2 // 3, hot_buffer_size, lengths), block_size=block_size)


@pytest.mark.parametrize("warp_size", [32, 64])
def test_blocks_of_one_and_of_an_odd_number_of_warps(rng, cpu_place, warp_size):
    cpu_place.warp_size = warp_size
    for warps in (1, 3, 5, 7):
        check(cpu_place, sized_case(rng, 100, 150, [400]), block_size=warps * warp_size)


@pytest.mark.parametrize("blocks_per_request", range(1, 9))
def test_blocks_per_request_give_the_same_bits(place, rng, blocks_per_request):
    case = sized_case(rng, 100, 150, [400, 90, 151, 700], 0.3, item_size_bytes=132, num_real_reqs=3)
    one_block = check(place, case, blocks_per_request=1)
    several = check(place, case, blocks_per_request=blocks_per_request)
    assert_same(without_stale_plan(several, case).arrays, without_stale_plan(one_block, case).arrays)


def test_blocks_per_request_with_every_block_size_and_mode(sweep_place, rng):
    for blocks, block_size, plan in itertools.product((2, 5), (256, 1024), (True, False)):
        case = sized_case(rng, 300, 400, [900, 500], 0.4, item_size_bytes=24, plan=plan)
        check(sweep_place, case, block_size=block_size, blocks_per_request=blocks)
        check(sweep_place, case, block_size=block_size, blocks_per_request=blocks, skip_io=True)


def test_more_blocks_than_misses(place, rng):
    for misses in range(3):
        row = Row(90, [*range(20), *range(50, 50 + misses)], np.arange(32))
        check(place, make_case(rng, [row], num_top_k=22, hot_buffer_size=32), blocks_per_request=8)


# Batches


@pytest.mark.parametrize("batch", [1, 2, 7, 32, 100])
def test_batches(sweep_place, rng, batch):
    lengths = rng.integers(0, 200, batch)
    check(sweep_place, sized_case(rng, 24, 40, lengths.tolist(), num_real_reqs=max(1, batch - 3)))


def test_a_full_batch_at_model_size(sweep_place, rng):
    check(
        sweep_place,
        sized_case(rng, 2048, 4096, [9000, 5000, 4096, 4097], 0.8, item_size_bytes=656, num_real_reqs=4),
        block_size=1024,
    )


# Schedules and widths


def test_the_order_in_which_threads_run_does_not_matter(cpu_place, rng):
    case = sized_case(rng, 200, 300, [900], 0.5, item_size_bytes=132)
    results = []
    for seed in (None, 0, 1, 2, 3, 4):
        with hisparse.cpu.options(warp_size=cpu_place.warp_size, seed=seed, strict=True):
            views = {name: array.copy() for name, array in case.arrays.items()}
            hisparse.load_cache_to_device_buffer_mla(
                **{name: array.view for name, array in views.items()}, **case.sizes, block_size=512
            )
        results.append(views)
    for views in results[1:]:
        assert_same(views, results[0])


# Shared memory


def test_an_amd_compute_unit_with_64_kib(cpu_place, rng):
    with hisparse.cpu.options(shared_memory_bytes=65_536):
        check(cpu_place, sized_case(rng, 2048, 8192, [9000], item_size_bytes=16), block_size=1024)
        case = sized_case(rng, 2048, 16_384, [17_000], item_size_bytes=16)
        with pytest.raises(ValueError, match=r"65,?_?536"):
            run(cpu_place, case, block_size=1024)


@pytest.mark.parametrize(("num_top_k", "hot_buffer_size"), [(2048, 8192), (127, 200), (128, 128), (255, 2000)])
def test_with_the_least_shared_memory_that_is_accepted(cpu_place, rng, num_top_k, hot_buffer_size):
    """Tables of tokens are as full as they get."""
    case = sized_case(rng, num_top_k, hot_buffer_size, [hot_buffer_size + 300], 0.3, item_size_bytes=8)

    def fits(shared_memory_bytes: int) -> bool:
        try:
            with hisparse.cpu.options(shared_memory_bytes=shared_memory_bytes):
                run(cpu_place, case)
        except ValueError as error:
            assert str(shared_memory_bytes) in str(error).replace(",", "")
            return False
        return True

    refused, enough = 1024, 262_144
    while enough - refused > 1:
        middle = (refused + enough) // 2
        refused, enough = (refused, middle) if fits(middle) else (middle, enough)
    with hisparse.cpu.options(shared_memory_bytes=enough):
        for hit_rate in (0.0, 0.5, 1.0):
            lengths = [hot_buffer_size + 300] * 6
            check(cpu_place, sized_case(rng, num_top_k, hot_buffer_size, lengths, hit_rate, noise=0, item_size_bytes=4))
    with hisparse.cpu.options(shared_memory_bytes=refused), pytest.raises(ValueError) as error:
        run(cpu_place, case)
    assert str(enough) in str(error.value).replace(",", "")
    assert np.array_equal(case.arrays["lru_slots"].raw, case.copy().arrays["lru_slots"].raw)
