"""load_cache_to_device_buffer_dsv4_mla: tokens in DeepSeek-V4 pages. What it shares with the plain op, that one's tests
cover; every call here is compared with it byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from family_cases import PAGE_BYTES, PAGE_TOKENS, check_dsv4, dsv4_case, get_token, put_token, random_pages
from places import assert_same, call, torch
from swap_in_cases import PLAN, Row, random_row

import hisparse

LEADS = [(0, 0), (8, 0), (0, 8), (8, 8), (16, 24)]


def random_case(rng, lengths, num_top_k=20, hot=32, hit_rate=0.5, **others):
    rows = [random_row(rng, length, num_top_k, hot, hit_rate) for length in lengths]
    return dsv4_case(rng, rows, num_top_k=num_top_k, hot_buffer_size=hot, **others)


@pytest.mark.parametrize("leads", LEADS, ids=str)
def test_value_and_scale_of_every_miss(place, rng, leads):
    check_dsv4(place, random_case(rng, [90, 300, 33, 20], leads=leads))
    check_dsv4(place, random_case(rng, [90], hit_rate=0.0, leads=leads))


def test_the_bytes_that_the_layout_names(place, rng):
    case = dsv4_case(rng, [Row(200, [150], {}, lru=range(8))], num_top_k=1, hot_buffer_size=8, host_rows=200)
    rid = case["req_pool_indices"][0]
    source, target = int(case["host_cache_locs"][rid, 150]), int(case["device_buffer_locs"][rid, 0])
    host, page, place_in_page = case["host_cache"].reshape(-1), source // 64, source % 64
    value = host[page * 37_440 + place_in_page * 576 :][:576].copy()
    scale = host[page * 37_440 + 36_864 + place_in_page * 8 :][:8].copy()
    device = check_dsv4(place, case)["device_buffer"].reshape(-1)
    assert (device[target // 64 * 37_440 + target % 64 * 576 :][:576] == value).all()
    assert (device[target // 64 * 37_440 + 36_864 + target % 64 * 8 :][:8] == scale).all()


def test_every_place_of_a_page(sweep_place, rng):
    """All 64 places on both sides, and the pages before and behind."""
    resident = np.arange(1000, 1192)
    case = dsv4_case(rng, [Row(1500, range(192), resident)], num_top_k=192, hot_buffer_size=192, host_rows=1600)
    rid = case["req_pool_indices"][0]
    for name, count in (("host_cache_locs", 192), ("device_buffer_locs", 192)):
        case[name][rid, :count] = rng.permutation(192)
    plain = case.plain
    for loc in range(192):
        plain["host_cache"][loc] = get_token(case["host_cache"], loc)
        plain["device_buffer"][loc] = get_token(case["device_buffer"], loc)
    check_dsv4(sweep_place, case)


@pytest.mark.parametrize("blocks_per_request", [1, 2, 5])
@pytest.mark.parametrize("block_size", [64, 256, 1024])
def test_blocks(sweep_place, rng, blocks_per_request, block_size):
    case = random_case(rng, [400, 90, 151, 30], 60, 70, num_real_reqs=3)
    check_dsv4(sweep_place, case, block_size=block_size, blocks_per_request=blocks_per_request)


@pytest.mark.parametrize(("num_top_k", "hot"), [(2048, 4096), (500, 8192), (3000, 3500)])
def test_every_size_of_the_kernel(sweep_place, rng, num_top_k, hot):
    check_dsv4(sweep_place, random_case(rng, [hot + 3000], num_top_k, hot, 0.95), block_size=1024)


@pytest.mark.parametrize("leads", LEADS, ids=str)
def test_several_scales_of_each_thread(place, rng, leads):
    check_dsv4(place, random_case(rng, [900, 700], 250, 256, 0.1, leads=leads), block_size=64)


@pytest.mark.parametrize("plan", [True, False])
def test_skip_io_moves_no_bytes(place, rng, plan):
    case = random_case(rng, [90, 20], plan=plan)
    after = check_dsv4(place, case, skip_io=True)
    assert np.array_equal(case["device_buffer"], after["device_buffer"])


def test_without_a_plan_and_by_position(place, rng):
    case = random_case(rng, [90, 33])
    expected = check_dsv4(place, case)
    for name in PLAN:
        del case.arrays[name], case.plain.arrays[name]
    check_dsv4(place, case)
    tables = ("top_k_tokens", "device_buffer_tokens", "host_cache_locs", "device_buffer_locs")
    pools = ("host_cache", "device_buffer", "top_k_device_locs", "req_pool_indices", "seq_lens", "lru_slots")
    views = {name: place.put(name, case.arrays[name])[1] for name in (*tables, *pools)}
    with place.options():
        hisparse.load_cache_to_device_buffer_dsv4_mla(*views.values(), 584, 20, 32)
    for name in ("top_k_device_locs", "device_buffer"):
        got = views[name] if place.library == "numpy" else views[name].cpu().numpy()
        assert np.array_equal(got, expected[name])


def test_a_part_of_a_page_holds_no_token(place, rng):
    """The pools end one byte before their third page does: its 64 locs are outside."""
    case = dsv4_case(
        rng,
        [Row(150, [7, 8, 9], {}, lru=range(8))],
        num_top_k=3,
        hot_buffer_size=8,
        host_rows=192,
        stale_host_locs=False,
    )
    rid = case["req_pool_indices"][0]
    case["host_cache_locs"][rid, [7, 8, 9]] = [127, 128, 126]
    for array in (case.arrays, case.plain.arrays):
        array["device_buffer_locs"].view[rid, :3] = [127, 5, 190]
    arrays = case.arrays | {"device_buffer": random_pages(rng, 192)}

    def cut(views):
        return views | {name: views[name].reshape(-1)[: 3 * PAGE_BYTES - 1] for name in ("host_cache", "device_buffer")}

    actual = call(place, hisparse.load_cache_to_device_buffer_dsv4_mla, arrays, cut, **case.sizes)
    pages = arrays["device_buffer"].copy()
    put_token(pages.view, 127, get_token(arrays["host_cache"].view, 127))
    assert_same({"device_buffer": actual["device_buffer"]}, {"device_buffer": pages})
    assert actual["top_k_device_locs"].view[0, :3].tolist() == [127, 5, 190]


def test_pools_of_any_dtype_and_shape(place, rng):
    def reshaped(views):
        host, device = views["host_cache"], views["device_buffer"]
        host = host.view("float32" if place.library == "numpy" else torch.bfloat16)
        return views | {"host_cache": host.reshape(len(host), 2, -1), "device_buffer": device.reshape(-1)}

    check_dsv4(place, random_case(rng, [90, 120]), reshaped)


def test_pools_of_more_than_4_gib(cpu_place):
    """Only the pages that hold the tokens are ever touched, so the memory need not be there."""
    pages = (5 << 30) // PAGE_BYTES
    host, device = (np.zeros((pages, PAGE_BYTES), np.uint8) for _ in range(2))
    far = pages * PAGE_TOKENS - 1
    rng = np.random.default_rng(0)
    sources, targets = [far, far - 70, 3], [far - 1, 2, far - 200]
    items = rng.integers(0, 256, (3, 584), np.uint8)
    for loc, item in zip(sources, items, strict=True):
        put_token(host, loc, item)
    host_locs = np.zeros((1, 100), np.int64)
    host_locs[0, [40, 41, 42]] = sources
    arguments = {
        "top_k_tokens": np.array([[40, 41, 42]], np.int32),
        "device_buffer_tokens": np.full((1, 9), -1, np.int32),
        "host_cache_locs": host_locs,
        "device_buffer_locs": np.array([[*targets, 0, 0, 0, 0, 0, 0]], np.int32),
        "host_cache": host,
        "device_buffer": device,
        "top_k_device_locs": np.zeros((1, 3), np.int32),
        "req_pool_indices": np.array([0]),
        "seq_lens": np.array([100]),
        "lru_slots": np.arange(8, dtype=np.int16)[None],
    }
    with cpu_place.options():
        hisparse.load_cache_to_device_buffer_dsv4_mla(**arguments, item_size_bytes=584, num_top_k=3, hot_buffer_size=8)
    for loc, item in zip(targets, items, strict=True):
        assert np.array_equal(get_token(device, loc), item)
