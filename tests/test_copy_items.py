"""hisparse.copy_items and the item copy of every target: byte-exact at each size and alignment, and nothing else."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import reference
from places import Guarded, assert_same, between_unreadable_pages, call, torch

import hisparse

MODEL_ITEM_SIZES = (132, 144, 512, 576, 584, 640, 656, 1024, 1152, 2048)
EVERY_ITEM_SIZE = (*range(1, 81), *MODEL_ITEM_SIZES)
MISALIGNMENTS = (0, 1, 2, 4, 8)


def copy_case(rng, item_size_bytes, count, leads=(0, 0), dtype=np.uint8, pool_rows=None):
    rows = pool_rows or count + 3
    width = item_size_bytes // np.dtype(dtype).itemsize
    src = Guarded.random(rng, dtype, (rows, width), lead=leads[0])
    dst = Guarded.random(rng, dtype, (rows + 2, width), lead=leads[1])
    return {
        "src": src,
        "dst": dst,
        "src_indices": Guarded.of(rng, rng.integers(0, rows, count), np.int64, lead=8),
        "dst_indices": Guarded.of(rng, rng.permutation(rows + 2)[:count], np.int64),
    }


def check_copy(place, arrays, item_size_bytes, prepare=None, **options):
    expected = {name: array.copy() for name, array in arrays.items()}
    reference.copy_items(**{name: array.view for name, array in expected.items()}, item_size_bytes=item_size_bytes)
    actual = call(place, hisparse.copy_items, arrays, prepare, item_size_bytes=item_size_bytes, **options)
    assert_same(actual, expected)
    return actual


@pytest.mark.parametrize("item_size_bytes", [20, 508, 512, 516, 520, 528, 1008, 1020, 1024, 1028, 1032, 1040, 2064])
@pytest.mark.parametrize("leads", [(0, 0), (4, 0), (0, 4), (8, 8), (1, 0), (3, 7)], ids=str)
def test_seams_of_the_wide_path(place, rng, item_size_bytes, leads):
    """Around WARP_SIZE * 16 bytes of both widths: whole wide steps, a remainder of a word, of half a word, of bytes."""
    check_copy(place, copy_case(rng, item_size_bytes, 9, leads), item_size_bytes)


@pytest.mark.parametrize("item_size_bytes", EVERY_ITEM_SIZE)
def test_every_item_size_at_every_misalignment(place, rng, item_size_bytes):
    for leads in itertools.product(MISALIGNMENTS, MISALIGNMENTS):
        check_copy(place, copy_case(rng, item_size_bytes, 3, leads), item_size_bytes)


@pytest.mark.parametrize("item_size_bytes", [1, 20, 512, 1028, 1040])
def test_all_16_misalignments_of_both_sides(place, rng, item_size_bytes):
    for leads in itertools.product(range(16), range(16)):
        check_copy(place, copy_case(rng, item_size_bytes, 2, leads), item_size_bytes)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 255, 257, 1025, 3000])
@pytest.mark.parametrize("item_size_bytes", [7, 48, 656])
def test_more_items_than_one_batch_of_warps(place, rng, count, item_size_bytes):
    check_copy(place, copy_case(rng, item_size_bytes, count), item_size_bytes)


@pytest.mark.parametrize("item_size_bytes", [7, 48, 480, 656])
def test_indices_behind_the_last_are_none(place, rng, item_size_bytes):
    """The indices are the beginning of a longer list, whose rest would be copied just as well."""
    count, rows = 10, 15
    arrays = copy_case(rng, item_size_bytes, count, pool_rows=rows)
    for name, most in (("src_indices", rows), ("dst_indices", rows + 2)):
        longer = Guarded.of(rng, rng.permutation(most), np.int64)
        arrays[name] = Guarded(longer.raw, longer.dtype, (count,), (1,), longer.lead)
    check_copy(place, arrays, item_size_bytes, blocks=1)


def test_a_large_item(place, rng):
    check_copy(place, copy_case(rng, 100_003, 2, (0, 5)), 100_003)


def test_negative_and_out_of_range_indices_skip_the_item(place, rng):
    arrays = copy_case(rng, 24, 12, pool_rows=40)
    arrays["src_indices"].view[:8] = [-1, 3, -(2**40), 4, 40, 2**40, 2**32, 5]
    arrays["dst_indices"].view[:8] = [0, -1, 1, -(2**63), 2, 3, 4, 42]
    before = arrays["dst"].view.copy()
    after = check_copy(place, arrays, 24)["dst"].view
    copied = arrays["dst_indices"].view[8:]
    assert np.array_equal(after[copied], arrays["src"].view[arrays["src_indices"].view[8:]])
    assert np.array_equal(np.delete(after, copied, 0), np.delete(before, copied, 0))


def test_a_thread_whose_first_word_is_of_a_skipped_item_copies_its_second(place, rng):
    """Sixteen items of 512 B are two words for each thread of a block; of one of them it is the first or the second."""
    for skipped in (slice(0, 8), slice(8, 16), slice(0, 16, 3)):
        arrays = copy_case(rng, 512, 16)
        arrays["src_indices"].view[skipped] = -1
        check_copy(place, arrays, 512, blocks=1)


def test_a_part_of_an_item_at_the_end_of_a_pool_is_no_row(place, rng):
    arrays = copy_case(rng, 1, 4)
    arrays["src"], arrays["dst"] = (Guarded.random(rng, np.uint8, (10 * 48 + 47,)) for _ in range(2))
    arrays["src_indices"].view[:] = [9, 10, 0, 1]
    arrays["dst_indices"].view[:] = [0, 1, 10, 9]
    check_copy(place, arrays, 48)


def test_no_indices_copy_nothing(place, rng):
    check_copy(place, copy_case(rng, 64, 0), 64)


def test_pools_without_rows_copy_nothing(place, rng):
    arrays = copy_case(rng, 16, 3)
    arrays["src"] = Guarded.random(rng, np.uint8, (0, 16))
    check_copy(place, arrays, 16)


def test_the_same_source_for_every_item(place, rng):
    arrays = copy_case(rng, 576, 50)
    arrays["src_indices"].view[:] = 17
    check_copy(place, arrays, 576)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "int32", "float32", "int64", "float64"])
def test_pools_of_any_dtype(place, rng, dtype):
    check_copy(place, copy_case(rng, 144, 6, dtype=dtype), 144)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "complex64"])
def test_pools_of_other_torch_dtypes(torch_place, rng, dtype):
    def as_dtype(views):
        return views | {name: views[name].view(getattr(torch, dtype)) for name in ("src", "dst")}

    check_copy(torch_place, copy_case(rng, 144, 6), 144, as_dtype)


@pytest.mark.parametrize("shapes", [((40, 3, 16), (20, 2, 3, 16)), ((40 * 48,), (40, 48)), ((10, 4, 48), (40 * 48,))])
def test_the_shape_of_a_contiguous_pool_is_free(place, rng, shapes):
    arrays = copy_case(rng, 48, 10, pool_rows=38)
    arrays["src"], arrays["dst"] = (Guarded.random(rng, np.uint8, shape) for shape in shapes)
    check_copy(place, arrays, 48)


def test_items_may_be_larger_or_smaller_than_the_rows_of_the_tensor(place, rng):
    arrays = copy_case(rng, 1, 5)
    arrays["src"], arrays["dst"] = (Guarded.random(rng, np.float32, (64, 6)) for _ in range(2))
    for item_size_bytes in (8, 12, 48):
        check_copy(place, arrays, item_size_bytes)


def test_within_one_pool(place, rng):
    arrays = copy_case(rng, 40, 6)
    pool = Guarded.random(rng, np.uint8, (20, 40))
    arrays["src_indices"].view[:] = rng.permutation(10)[:6]
    arrays["dst_indices"].view[:] = 10 + rng.permutation(10)[:6]
    expected = pool.copy()
    reference.copy_items(expected.view, expected.view, arrays["src_indices"].view, arrays["dst_indices"].view, 40)
    arrays = {"dst": pool, "src_indices": arrays["src_indices"], "dst_indices": arrays["dst_indices"]}
    actual = call(place, hisparse.copy_items, arrays, lambda views: views | {"src": views["dst"]}, item_size_bytes=40)
    assert_same(actual, {"dst": expected})


@pytest.mark.parametrize("item_copy", ["wave", "chunk"])
@pytest.mark.parametrize("warp_size", [32, 64])
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_source_pool_is_read(warp_size, item_copy):
    """The pages on both sides of the pool cannot be read, so one byte too many ends the process."""
    subprocess.run([sys.executable, __file__, str(warp_size), item_copy], check=True, timeout=300)


def copy_between_unreadable_pages(warp_size: int, item_copy: str) -> None:
    readable = between_unreadable_pages()
    readable[:] = np.random.default_rng(0).integers(0, 256, len(readable))
    with hisparse.cpu.options(warp_size=warp_size, item_copy=item_copy, strict=True):
        for item_size_bytes in (*EVERY_ITEM_SIZE, 516, 520, 528, 1028, 1032, 1040):
            rows = min(5, len(readable) // item_size_bytes)
            size = rows * item_size_bytes
            for src in (readable[:size], readable[len(readable) - size :]):
                dst, locs = np.zeros(size, np.uint8), np.arange(rows)
                hisparse.copy_items(src, dst, locs, locs, item_size_bytes)
                assert np.array_equal(src, dst), item_size_bytes


if __name__ == "__main__":
    copy_between_unreadable_pages(int(sys.argv[1]), sys.argv[2])
