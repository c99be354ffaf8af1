"""The transfers of hisparse.kvcacheio by a kernel: every op, layout, size and order against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from kvcacheio_cases import DIRECTIONS, HEAD_OPS, OPS, Placed, Shape, check, expect, make_case
from places import GpuPlace, assert_same

ITEM_SIZES = (1, 2, 3, 4, 12, 24, 132, 144, 512, 576, 584, 640, 656, 1024, 1028, 1152, 4096)
SKIPPED = [-1, -2, -(2**31), -(2**63)]


@pytest.fixture(params=OPS)
def op(request):
    return request.param


def heads_of(op: str, item_size: int, wanted: int = 4) -> int:
    return wanted if op in HEAD_OPS and item_size % wanted == 0 else 1


@pytest.mark.parametrize("item_size", ITEM_SIZES)
def test_item_sizes(place, rng, op, item_size):
    shape = Shape(item_size, head_num=heads_of(op, item_size), page_size=4)
    check(rng, place, make_case(rng, op, shape))


@pytest.mark.parametrize("leads", [(4, 0), (0, 8), (1, 3), (8, 8), (16, 4)], ids=str)
def test_alignments(sweep_place, rng, op, leads):
    for item_size in (16, 132, 512, 584, 1028):
        shape = Shape(item_size, head_num=heads_of(op, item_size, 2), page_size=2, leads=leads)
        check(rng, sweep_place, make_case(rng, op, shape))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("head_num", "item_size"), [(1, 144), (4, 512), (4, 20), (5, 80), (5, 655), (8, 1024), (3, 3)])
@pytest.mark.parametrize("head_op", HEAD_OPS)
def test_pages_and_heads(place, rng, head_op, head_num, item_size, page_size):
    shape = Shape(item_size, head_num=head_num, page_size=page_size, tokens=128)
    check(rng, place, make_case(rng, head_op, shape))


@pytest.mark.parametrize("num_layers", [1, 2, 5, 27, 61, 80])
def test_layers(sweep_place, rng, op, num_layers):
    shape = Shape(48, num_layers=num_layers, layer_id=num_layers - 1, head_num=heads_of(op, 48), page_size=2, tokens=8)
    check(rng, sweep_place, make_case(rng, op, shape))


def test_every_layer_of_a_paged_pool(sweep_place, rng):
    for op in ("transfer_kv_per_layer_pf_lf", "transfer_kv_per_layer_ph_lf", "transfer_kv_per_layer_mla_pf_lf"):
        for layer_id in range(4):
            shape = Shape(64, num_layers=4, layer_id=layer_id, head_num=heads_of(op, 64), page_size=4)
            check(rng, sweep_place, make_case(rng, op, shape))


@pytest.mark.parametrize("padding", [4, 60, 143])
def test_a_token_may_have_more_bytes_than_its_layers(sweep_place, rng, op, padding):
    head_num = 4 if op in HEAD_OPS and padding % 4 == 0 else 1
    check(rng, sweep_place, make_case(rng, op, Shape(padding=padding, head_num=head_num, page_size=2)))


@pytest.mark.parametrize("count", [0, 1, 2, 31, 33, 64, 65, 300, 1000])
def test_numbers_of_tokens(sweep_place, rng, op, count):
    shape = Shape(36, num_layers=2, head_num=heads_of(op, 36), page_size=8, tokens=1024)
    check(rng, sweep_place, make_case(rng, op, shape, count))


def test_only_skipped_pairs(sweep_place, rng, op):
    shape = Shape(page_size=4)
    case = make_case(rng, op, shape, pairs=(np.array([*SKIPPED, 3, 4]), np.array([1, 2, 3, 4, -1, -7])))
    check(rng, sweep_place, case)
    assert_same(expect(case).flat(), case.flat())


def test_indices_past_the_end_of_a_pool_are_skipped(sweep_place, rng, op):
    """Not with layer tables, whose pools have no known end."""
    if "table" in OPS[op]:
        pytest.skip("the pools of a layer table have no known end")
    ends = np.array([32, 33, 2**31, 2**32, 2**33 + 1, 2**62, 5, 6])
    check(rng, sweep_place, make_case(rng, op, Shape(page_size=4), pairs=(ends, np.arange(8))))
    check(rng, sweep_place, make_case(rng, op, Shape(page_size=4), pairs=(np.arange(8), ends)))


def test_a_part_of_a_page_is_no_page(sweep_place, rng):
    """32 tokens make three pages of 10; the last two tokens are none of the pool's."""
    shape = Shape(24, head_num=2, page_size=10, tokens=32)
    case = make_case(rng, "transfer_kv_all_layer_lf_ph", shape, pairs=(np.arange(32), np.arange(32)))
    for name in ("dst_k", "dst_v"):
        (pool,) = case.pools[name]
        case.pools[name] = [type(pool).random(rng, np.uint8, (32 * shape.layout_dim,))]
    check(rng, sweep_place, case)


def test_one_source_for_all(sweep_place, rng, op):
    check(rng, sweep_place, make_case(rng, op, Shape(page_size=4), pairs=(np.full(20, 7), np.arange(20) + 5)))


def test_a_repeated_destination_holds_bytes_of_its_sources(sweep_place, rng):
    case = make_case(rng, "transfer_kv_per_layer_mla", Shape(584), pairs=(np.arange(20), np.full(20, 3)))
    placed = Placed(rng, sweep_place, case)
    placed.launch()
    after = placed.fetch()["dst[0]"]
    assert (after.view[3] == case.pools["src"][0].view[:20]).any(axis=0).all()
    before = case.pools["dst"][0]
    assert np.array_equal(np.delete(after.view, 3, 0), np.delete(before.view, 3, 0))


@pytest.mark.parametrize("block_quota", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("num_warps_per_block", [1, 2, 5, 16])
def test_launch_shapes(sweep_place, rng, block_quota, num_warps_per_block):
    for op in ("transfer_kv_per_layer", "transfer_kv_all_layer_lf_ph", "transfer_kv_per_layer_mla_pf_lf"):
        shape = Shape(144, num_layers=5, head_num=heads_of(op, 144), page_size=4, tokens=100)
        options = {"block_quota": block_quota, "num_warps_per_block": num_warps_per_block}
        check(rng, sweep_place, make_case(rng, op, shape, 75), **options)


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(sweep_place, seed):
    rng = np.random.default_rng(seed)
    op = rng.choice(list(OPS))
    head_num = int(rng.choice([1, 2, 4, 5])) if op in HEAD_OPS else 1
    num_layers, page_size = int(rng.integers(1, 9)), int(rng.choice([1, 2, 3, 16]))
    shape = Shape(
        item_size=int(rng.choice([1, 4, 8, 16, 24, 52, 128, 144])) * head_num,
        num_layers=num_layers,
        layer_id=int(rng.integers(num_layers)),
        page_size=page_size,
        head_num=head_num,
        tokens=page_size * int(rng.integers(1, 40)),
        padding=int(rng.choice([0, 0, 16, 3])) * head_num,
        leads=tuple(rng.choice([0, 0, 4, 8, 1, 13], 2).tolist()),
    )
    direction = rng.choice(list(DIRECTIONS))
    quota = int(rng.integers(1, 5))
    check(
        rng, sweep_place, make_case(rng, op, shape, int(rng.integers(shape.tokens + 1))), direction, block_quota=quota
    )


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("item_size", [132, 144, 512, 576, 584, 656, 1152])
def test_directions(rng, op, item_size, direction):
    shape = Shape(item_size, num_layers=4, head_num=heads_of(op, item_size), page_size=16, tokens=2048)
    for block_quota in (1, 2, 16):
        check(rng, GpuPlace(), make_case(rng, op, shape), direction, block_quota=block_quota)
