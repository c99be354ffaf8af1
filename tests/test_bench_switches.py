"""hisparse.bench.switches: without a part of the item copy the bytes are the same, and another launch moves them."""

from __future__ import annotations

import pytest
from swap_in_cases import Row, check, make_case
from test_copy_items import check_copy, copy_case

from hisparse.bench.switches import PARTS, leave_out


@pytest.mark.parametrize("item_size_bytes", [7, 24, 508, 512, 520, 576, 584, 656, 1008, 1024, 1040, 1152, 2064])
@pytest.mark.parametrize("part", PARTS)
def test_the_copy_is_byte_exact(place, rng, part, item_size_bytes):
    for leads in ((0, 0), (8, 0), (0, 4), (8, 8), (3, 7)):
        with leave_out(part):
            check_copy(place, copy_case(rng, item_size_bytes, 9, leads), item_size_bytes)


@pytest.mark.parametrize("item_size_bytes", [7, 512, 520, 576, 1024, 1152])
@pytest.mark.parametrize("part", PARTS)
def test_the_swap_in_is_byte_exact(place, rng, part, item_size_bytes):
    rows = [Row(40, rng.permutation(39)[:12]), Row(100, rng.permutation(99)[:12])]
    case = make_case(rng, rows, num_top_k=12, hot_buffer_size=16, item_size_bytes=item_size_bytes)
    for blocks in (1, 3):
        with leave_out(part):
            check(place, case, blocks_per_request=blocks)


def test_what_is_launched_without_a_part(run):
    run("""
        from hisparse.bench.switches import PARTS, leave_out
        call = Call(driver)
        pool, indices = Tensor(np.zeros((64, 16), np.uint8)), Tensor(np.zeros(8, np.int64))

        def launched():
            call()
            word_bytes = driver.library.fake_word_bytes()
            hisparse.copy_items(pool, pool, indices, indices, 16)
            return word_bytes, driver.library.fake_variant()

        assert launched() == (16, 0)
        for part, expected in zip(PARTS, ((8, 0), (16, 1), (16, 2))):
            try:
                with leave_out(part):
                    assert launched() == expected, part
                    raise KeyError
            except KeyError:
                pass
            assert launched() == (16, 0), part
    """)


def test_a_part_that_there_is_not():
    with pytest.raises(ValueError), leave_out("everything"):
        pass
