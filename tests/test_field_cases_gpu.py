"""Field cases that need a GPU: memory that it reaches or not, streams, devices, and pools above 4 GiB."""

from __future__ import annotations

import numpy as np
import pytest
from places import GpuPlace, Registered, assert_same, mapped_tensor, torch
from swap_in_cases import Row, check, expect, make_case, random_row, run, without_stale_plan

import hisparse

pytestmark = pytest.mark.gpu

MIB = 2**20


def small_case(rng, item_size_bytes=512, rows=2, **others):
    rows = [random_row(rng, 90, 20, 32, 0.3) for _ in range(rows)]
    return make_case(rng, rows, num_top_k=20, hot_buffer_size=32, item_size_bytes=item_size_bytes, **others)


def copy_from(src, rows: int) -> None:
    dst = torch.zeros(rows, 512, dtype=torch.uint8, device="cuda")
    locs = torch.arange(rows, device="cuda")
    hisparse.copy_items(src, dst, locs, locs.flip(0), 512)
    assert torch.equal(dst.cpu().flip(0), src.view(-1, 512)[:rows])


def test_F21_registered_host_memory(rng):
    memory, address = mapped_tensor(8 * MIB)
    case = small_case(rng)
    raw = case.arrays["host_cache"].raw
    memory[: len(raw)] = torch.from_numpy(raw)
    host_cache = case.arrays["host_cache"].on_torch(memory)
    with Registered(address, 8 * MIB):
        check(GpuPlace(), case, lambda views: views | {"host_cache": host_cache})
        copy_from(memory[: 16 * 512], 16)
    with pytest.raises(ValueError, match="host_cache"):
        run(GpuPlace(), case, lambda views: views | {"host_cache": host_cache})


def test_F21_a_pool_that_is_registered_in_part_is_refused():
    memory, address = mapped_tensor(8 * MIB)
    memory.copy_(torch.arange(8 * MIB, dtype=torch.int64) % 251)
    with Registered(address, 4 * MIB):
        copy_from(memory[: 4 * MIB], 4 * MIB // 512)
        with pytest.raises(ValueError, match="src"):
            copy_from(memory, 16)


def test_F23_a_pool_registered_in_chunks_is_right_or_refused():
    memory, address = mapped_tensor(8 * MIB)
    memory.copy_(torch.arange(8 * MIB, dtype=torch.int64) % 251)
    with Registered(address, 4 * MIB), Registered(address + 4 * MIB, 4 * MIB):
        try:
            copy_from(memory, 8 * MIB // 512)
        except ValueError as error:
            assert "src" in str(error)


def test_F21_pageable_host_memory_is_refused(rng):
    case = small_case(rng)
    for pool in ("host_cache", "device_buffer"):
        with pytest.raises(ValueError, match=pool):
            run(GpuPlace(), case, lambda views, pool=pool: views | {pool: views[pool].cpu().clone()})
    check(GpuPlace(), case)


ON_DEVICE = (
    "top_k_tokens",
    "device_buffer_tokens",
    "host_cache_locs",
    "device_buffer_locs",
    "top_k_device_locs",
    "req_pool_indices",
    "seq_lens",
    "lru_slots",
    "num_real_reqs",
    "miss_src",
    "miss_dst",
    "miss_count",
)


@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize("pinned", [False, True])
def test_F28_a_table_on_the_host_is_refused(rng, name, pinned):
    def on_host(views):
        view = views[name]
        host = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, pin_memory=pinned)
        return views | {name: host.copy_(view)}

    case = small_case(rng, num_real_reqs=2)
    with pytest.raises(ValueError, match=name):
        run(GpuPlace(), case, on_host)
    check(GpuPlace(), case)


def test_F26_the_current_stream_of_the_tensors_device(rng):
    """The call sees what was written late on a side stream, and does not wait for the default stream."""
    place, case, side = GpuPlace(), small_case(rng), torch.cuda.Stream()
    raws, views = {}, {}
    for name, array in case.arrays.items():
        raws[name], views[name] = place.put(name, array)
    late = {name: raws[name].clone() for name in ("top_k_tokens", "host_cache", "seq_lens")}
    late["host_cache"] = late["host_cache"].cuda()
    views["top_k_tokens"].fill_(-1)
    views["host_cache"].zero_()
    hisparse.load_cache_to_device_buffer_mla(**views, **case.sizes, skip_io=True)  # loads the kernels
    for name, array in case.arrays.items():
        if name not in late:
            raws[name].copy_(torch.from_numpy(array.raw))
    torch.cuda.synchronize()

    torch.cuda._sleep(4_000_000_000)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for name, raw in late.items():
            raws[name].copy_(raw, non_blocking=True)
        hisparse.load_cache_to_device_buffer_mla(**views, **case.sizes)
    side.synchronize()
    assert not torch.cuda.default_stream().query(), "the call waited for the default stream"
    after = case.copy()
    for name, array in after.arrays.items():
        array.raw[:] = place.fetch(raws[name])
    assert_same(without_stale_plan(after, case).arrays, without_stale_plan(expect(case), case).arrays)


def test_F13_each_device_in_turn_and_the_current_one_stays(rng):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    rows = [random_row(rng, 9000, 2048, 8192)]
    case = make_case(rng, rows, num_top_k=2048, hot_buffer_size=8192, item_size_bytes=144)
    for current in (0, 1):
        with torch.cuda.device(current):
            for index in (0, 1):
                check(GpuPlace(index), case, block_size=1024)
                assert torch.cuda.current_device() == current


def test_F13_the_current_device_is_unchanged_with_one_gpu(rng):
    check(GpuPlace(), small_case(rng))
    assert torch.cuda.current_device() == 0


def test_F13_more_shared_memory_than_any_device_has(rng):
    hot = 32_768
    top_k = 16_383
    rows = [Row(hot + 9, range(top_k))]
    case = make_case(rng, rows, num_top_k=top_k, hot_buffer_size=hot, item_size_bytes=4)
    with pytest.raises(ValueError, match=r"\d{3},?\d{3}.*\d{2,3},?\d{3}"):
        run(GpuPlace(), case, block_size=1024)
    check(GpuPlace(), small_case(rng))


def test_F15_a_device_buffer_above_4_gib(rng):
    free, _ = torch.cuda.mem_get_info()
    rows, item = 5_000_000, 1056
    if free < 2 * rows * item:
        pytest.skip("not enough device memory")
    dst = torch.zeros(rows, item, dtype=torch.uint8, device="cuda")
    src = torch.from_numpy(rng.integers(1, 256, (4, item)).astype(np.uint8)).pin_memory()
    locs = torch.tensor([rows - 1, 2**32 // item + 1, 2**31 // item + 1, 3], device="cuda")
    hisparse.copy_items(src, dst, torch.arange(4, device="cuda"), locs, item)
    assert torch.equal(dst[locs].cpu(), src)
    assert int(dst.count_nonzero()) == src.numel()
    back = torch.zeros(4, item, dtype=torch.uint8, device="cuda")
    hisparse.copy_items(dst, back, locs, torch.arange(4, device="cuda"), item)
    assert torch.equal(back.cpu(), src)


def test_numpy_arrays_do_not_mix_with_gpu_tensors(rng):
    case = small_case(rng)
    with pytest.raises((ValueError, TypeError), match="lru_slots"):
        run(GpuPlace(), case, lambda views: views | {"lru_slots": case["lru_slots"].copy()})
