"""The swap-in's relatives on a GPU: random calls in bulk, graphs, a side stream, and pools of more than 4 GiB."""

from __future__ import annotations

import numpy as np
import pytest
from family_cases import (
    PAGE_BYTES,
    PAGE_TOKENS,
    block_case,
    check_blocks,
    check_dsv4,
    copy_planned,
    dsv4_case,
    get_token,
    put_token,
    random_block_row,
)
from places import GpuPlace, Guarded, assert_same, assert_takes_no_device_memory, torch
from swap_in_cases import random_row
from test_planned_copy import check_plan, plan_case

import hisparse

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_in_bulk(seed):
    rng, place = np.random.default_rng(seed), GpuPlace()
    for _ in range(10):
        hot = int(rng.choice([int(rng.integers(1, 200)), int(rng.integers(200, 2500)), 4096, 8192]))
        num_top_k = int(rng.integers(1, min(hot, 2048) + 1))
        lengths = (hot + rng.integers(-hot // 8, 2 * hot + 2, int(rng.integers(1, 4)))).tolist()
        rows = [random_row(rng, length, num_top_k, hot, rng.random(), rng.choice([0, 0.1])) for length in lengths]
        leads = rng.choice([0, 8], 2).tolist()
        options = {"block_size": int(rng.choice([256, 512, 1024]))}
        options["blocks_per_request"] = None if rng.random() < 0.5 else int(rng.integers(1, 9))
        case = dsv4_case(rng, rows, leads, num_top_k=num_top_k, hot_buffer_size=hot, plan=bool(rng.random() < 0.5))
        check_dsv4(place, case, **options)

        size = int(rng.integers(1, min(hot, 128) + 1))
        width = int(rng.integers(1, max(2, min(hot, 2048) // size)))
        block_rows = [random_block_row(rng, length, width, size, hot) for length in lengths]
        item, leads = int(rng.choice([8, 20, 128, 512, 1028])), rng.choice([0, 0, 8, 4, 1], 4).tolist()
        check_blocks(place, block_case(rng, block_rows, size, hot, item, leads), **options)

        counts = rng.integers(0, 60, int(rng.integers(1, 150)))
        dsv4 = bool(rng.random() < 0.3)
        case = plan_case(
            rng, counts, 60, item, len(counts) - int(rng.integers(2)), dsv4, rng.choice([0, 8], 2).tolist()
        )
        check_plan(place, *case, num_blocks=int(rng.integers(1, 20)), block_size=int(rng.choice([64, 256, 1024])))


@pytest.mark.parametrize("dsv4", [False, True])
def test_a_graph_reads_what_changes_between_replays(rng, dsv4):
    place = GpuPlace()
    arrays, sizes = plan_case(rng, [3, 0, 8, 1, 5], num_real_reqs=5, dsv4=dsv4)
    raws, views = zip(*(place.put(name, array) for name, array in arrays.items()), strict=True)
    raws, views = (dict(zip(arrays, values, strict=True)) for values in (raws, views))
    hisparse.copy_cache_planned_mla(**views, **sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hisparse.copy_cache_planned_mla(**views, **sizes)
    for real in (5, 0, 3, -1, 9, 4):
        arrays["num_real_reqs"].view[0] = real
        arrays["miss_count"].view[:] = rng.integers(-1, 12, 5)
        arrays["device_buffer"].view[:] = rng.integers(0, 256, arrays["device_buffer"].shape)
        for name, raw in raws.items():
            raw.copy_(torch.from_numpy(arrays[name].raw))
        torch.cuda.synchronize()
        graph.replay()
        expected = {name: array.copy() for name, array in arrays.items()}
        copy_planned(**{name: array.view for name, array in expected.items()}, **sizes)
        assert_same({name: array.with_raw(place.fetch(raws[name])) for name, array in arrays.items()}, expected)


def test_a_swap_in_and_the_replay_of_its_plan_in_one_graph(rng):
    """One layer plans, a second one gets its items on a side stream, and both join again."""
    place, batch, num_top_k, hot = GpuPlace(), 4, 64, 96
    rows = [random_row(rng, 300, num_top_k, hot, 0.5) for _ in range(batch)]
    case = dsv4_case(rng, rows, num_top_k=num_top_k, hot_buffer_size=hot)
    views = {name: place.put(name, array)[1] for name, array in case.arrays.items()}
    other_host = Guarded.random(rng, np.uint8, case["host_cache"].shape)
    other_device = Guarded.random(rng, np.uint8, case["device_buffer"].shape)
    host_view, (raw, device_view) = place.put("host_cache", other_host)[1], place.put("device_buffer", other_device)
    real = torch.tensor([batch], dtype=torch.int32, device="cuda")
    plan = {name: views[name] for name in ("miss_src", "miss_dst", "miss_count")}
    side = torch.cuda.Stream()

    def both_layers():
        hisparse.load_cache_to_device_buffer_dsv4_mla(**views, **case.sizes)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            hisparse.copy_cache_planned_mla(
                **plan,
                num_real_reqs=real,
                host_cache=host_view,
                device_buffer=device_view,
                item_size_bytes=584,
                is_dsv4_layout=True,
            )
        torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both_layers()
    graph.replay()
    torch.cuda.synchronize()
    expected = other_device.copy()
    src, dst, count = (plan[name].cpu().numpy() for name in ("miss_src", "miss_dst", "miss_count"))
    assert count.sum() > 50
    for b in range(batch):
        for i in range(count[b]):
            put_token(expected.view, dst[b, i], get_token(other_host.view, src[b, i]))
    assert_same({"other layer": other_device.with_raw(place.fetch(raw))}, {"other layer": expected})


def test_beside_a_compute_kernel_it_finishes_first():
    """A long matrix product keeps the GPU busy; the copy on a side stream does not wait for its end."""
    rows, width = 24, 400
    src = torch.randint(0, rows * width, (rows, width), device="cuda")
    dst = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    count, real = torch.full((rows,), width, device="cuda").int(), torch.tensor([rows], device="cuda").int()
    host = torch.randint(0, 256, (rows * width, 512), dtype=torch.uint8).pin_memory()
    device = torch.zeros(rows * width, 512, dtype=torch.uint8, device="cuda")
    matrices = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    side, copied, computed = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    def compute():
        for _ in range(20):
            matrices[0] @ matrices[1]

    def copy():
        hisparse.copy_cache_planned_mla(
            miss_src=src,
            miss_dst=dst,
            miss_count=count,
            num_real_reqs=real,
            host_cache=host,
            device_buffer=device,
            item_size_bytes=512,
        )

    compute(), copy(), torch.cuda.synchronize()
    device.zero_(), torch.cuda.synchronize()
    compute()
    computed.record()
    with torch.cuda.stream(side):
        copy()
        copied.record()
    copied.synchronize()
    assert not computed.query()
    torch.cuda.synchronize()
    assert torch.equal(device[dst.reshape(-1).long()].cpu(), host[src.reshape(-1).cpu()])


@pytest.mark.parametrize("op", ["swap_in", "planned"])
def test_pools_of_more_than_4_gib(op):
    pages = (9 << 29) // PAGE_BYTES
    device = torch.zeros(pages, PAGE_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.randint(0, 256, (4, PAGE_BYTES), dtype=torch.uint8).pin_memory()
    sources, targets = [7, 200, 64], [pages * PAGE_TOKENS - 1, 5, (1 << 32) // 585 + 70]
    plan = {"miss_src": torch.tensor([sources]).cuda(), "miss_dst": torch.tensor([targets]).int().cuda()}
    if op == "planned":
        hisparse.copy_cache_planned_mla(
            **plan,
            miss_count=torch.tensor([3]).int().cuda(),
            num_real_reqs=torch.tensor([1]).int().cuda(),
            host_cache=host,
            device_buffer=device,
            item_size_bytes=584,
            is_dsv4_layout=True,
        )
    else:
        host_locs = torch.zeros(1, 100, dtype=torch.int64)
        host_locs[0, [40, 41, 42]] = torch.tensor(sources)
        hisparse.load_cache_to_device_buffer_dsv4_mla(
            torch.tensor([[40, 41, 42]]).int().cuda(),
            torch.full((1, 9), -1).int().cuda(),
            host_locs.cuda(),
            torch.tensor([[*targets, 0, 0, 0, 0, 0, 0]]).int().cuda(),
            host,
            device,
            torch.zeros(1, 3).int().cuda(),
            torch.tensor([0]).cuda(),
            torch.tensor([100]).cuda(),
            torch.arange(8).short()[None].cuda(),
            584,
            3,
            8,
        )
    for source, target in zip(sources, targets, strict=True):
        page = device[target // PAGE_TOKENS].cpu().numpy()
        assert np.array_equal(get_token(page, target % PAGE_TOKENS), get_token(host.numpy(), source))


def test_calls_take_no_device_memory():
    arrays, sizes = plan_case(np.random.default_rng(0), [3, 4])
    views = {name: GpuPlace().put(name, array)[1] for name, array in arrays.items()}
    assert_takes_no_device_memory(lambda: hisparse.copy_cache_planned_mla(**views, **sizes))
