"""hisparse.kvcacheio on a GPU: memory that it reaches or not, streams, graphs, devices, and pools above 4 GiB."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import numpy as np
import pytest
from kvcacheio_cases import DIRECTIONS, HEAD_OPS, OPS, Placed, Shape, check, expect, make_case, random_pairs
from places import GpuPlace, assert_same, assert_takes_no_device_memory, torch

import hisparse.kvcacheio as kvcacheio

pytestmark = pytest.mark.gpu

GIB = 2**30


def shape_of(op: str, item_size: int = 656, **others) -> Shape:
    return Shape(item_size, head_num=4 if op in HEAD_OPS else 1, page_size=16, **{"tokens": 2048, **others})


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_in_bulk(seed):
    rng = np.random.default_rng(seed)
    for op in rng.permutation(list(OPS) * 3).tolist():
        heads = int(rng.choice([1, 4, 5])) if op in HEAD_OPS else 1
        layers = int(rng.integers(1, 81)) if rng.random() < 0.3 else int(rng.integers(1, 6))
        page_size = int(rng.choice([1, 16, 64]))
        shape = Shape(
            item_size=int(rng.choice([1, 4, 24, 128, 132, 144, 512, 576, 584, 656, 1152])) * heads,
            num_layers=layers,
            layer_id=int(rng.integers(layers)),
            page_size=page_size,
            head_num=heads,
            tokens=page_size * int(rng.integers(1, 2 + 4000 // (layers * page_size))),
            padding=int(rng.choice([0, 0, 16])) * heads,
            leads=tuple(rng.choice([0, 0, 4, 8, 1, 13], 2).tolist()),
        )
        options = {"block_quota": int(rng.choice([1, 2, 4, 16])), "num_warps_per_block": int(rng.choice([1, 8, 16]))}
        case = make_case(rng, op, shape, int(rng.integers(shape.tokens + 1)))
        check(rng, GpuPlace(), case, rng.choice(list(DIRECTIONS)), **options)


def filled(size: int, device: str):
    pool = torch.empty(size // 8, dtype=torch.int64, device=device, pin_memory=device == "cpu")
    return pool.view(torch.uint8)


@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
@pytest.mark.parametrize("layout", ["lf", "pf", "ph"])
def test_F15_pools_above_4_gib(rng, layout, direction):
    """Tokens around 2 GiB, 4 GiB and at the end of pools of 5 GiB, from and to layer 2 of 3."""
    item, layers, page, heads = 656, 3, 16, 4
    row = item if layout == "lf" else item * layers
    tokens = 5 * GIB // row // page * page
    if torch.cuda.mem_get_info()[0] < 12 * GIB:
        pytest.skip("not enough device memory")
    try:
        pools = [filled(tokens * row, "cpu" if on_host else "cuda") for on_host in DIRECTIONS[direction]]
    except RuntimeError as error:
        pytest.skip(str(error))
    edges = [int(edge) // row for edge in (0, 2 * GIB, 4 * GIB)] + [tokens - 2]
    locs = torch.tensor([edge + step for edge in edges for step in (0, 1)])
    near = torch.arange(len(locs))
    items = torch.from_numpy(rng.integers(1, 256, (len(locs), item)).astype(np.uint8)).cuda()

    def table(pool):
        return torch.tensor([kvcacheio.get_device_accessible_ptr(pool, 0)] * layers, dtype=torch.uint64).cuda()

    src, dst = pools
    original, back = items.clone(), torch.zeros_like(items)
    locs, near = locs.cuda(), near.cuda()
    if layout == "lf":
        kvcacheio.transfer_kv_per_layer_mla(items, src, near, locs, item)
        kvcacheio.transfer_kv_per_layer_mla(src, dst, locs, locs.flip(0), item)
        kvcacheio.transfer_kv_per_layer_mla(dst, back, locs.flip(0), near, item)
    elif layout == "pf":
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table(items), src, near, locs, item, row, layers)
        kvcacheio.transfer_kv_per_layer_mla_pf_lf(src, items.zero_(), locs, near, 2, item, row)
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table(items), dst, near, locs, item, row, layers)
        kvcacheio.transfer_kv_per_layer_mla_pf_lf(dst, back, locs, near, 2, item, row)
    else:
        sizes = (item, row, layers, page, heads)
        kvcacheio.transfer_kv_all_layer_lf_ph(*[table(items), src] * 2, near, locs, *sizes)
        kvcacheio.transfer_kv_per_layer_ph_lf(*[src, back] * 2, locs, near, 2, item, row, page, heads)
        items.zero_().copy_(back)
        kvcacheio.transfer_kv_all_layer_lf_ph(*[table(items), dst] * 2, near, locs, *sizes)
        kvcacheio.transfer_kv_per_layer_ph_lf(*[dst, back.zero_()] * 2, locs, near, 2, item, row, page, heads)
    torch.cuda.synchronize()
    assert torch.equal(items, original) and torch.equal(back, original)
    if layout == "lf":
        assert torch.equal(dst.view(-1, item)[locs.flip(0).to(dst.device)].cuda(), original)


def test_F21_registered_host_memory(rng):
    memory = mmap.mmap(-1, 8 * 2**20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    src = torch.frombuffer(memory, dtype=torch.uint8)[: 16 * 512].view(16, 512)
    src.copy_(torch.from_numpy(rng.integers(0, 256, (16, 512)).astype(np.uint8)))
    dst, order = torch.zeros(16, 512, dtype=torch.uint8, device="cuda"), torch.arange(16, device="cuda")
    assert int(torch.cuda.cudart().cudaHostRegister(address, 8 * 2**20, 0)) == 0
    try:
        kvcacheio.transfer_kv_per_layer_mla(src, dst, order, order.flip(0), 512)
        assert torch.equal(dst.cpu().flip(0), src)
        tables = [
            torch.tensor([kvcacheio.get_device_accessible_ptr(pool, 0)], dtype=torch.uint64).cuda()
            for pool in (src, dst)
        ]
        kvcacheio.transfer_kv_all_layer_mla(*tables, order, order, 512, 1)
        assert torch.equal(dst.cpu(), src)
        kvcacheio.transfer_kv_direct([src], [dst.zero_()], order.cpu(), order.flip(0), 1)
        assert torch.equal(dst.cpu().flip(0), src)
        torch.cuda.synchronize()
    finally:
        assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0
    for call in (
        lambda: kvcacheio.transfer_kv_per_layer_mla(src, dst, order, order, 512),
        lambda: kvcacheio.transfer_kv_direct([src], [dst], order, order, 1),
        lambda: kvcacheio.get_device_accessible_ptr(src, 0),
    ):
        with pytest.raises(ValueError, match=r"(src|src_layers\[0\]|tensor): expected host memory that"):
            call()


def test_F28_indices_on_the_cpu(rng):
    """The same rule for every op: indices are on the GPU, and the next call works."""
    for op in OPS:
        placed = Placed(rng, GpuPlace(), make_case(rng, op, shape_of(op, tokens=64)))
        for name in ("src_indices", "dst_indices"):
            on_gpu = placed.views[name]
            for there in (on_gpu.cpu(), on_gpu.cpu().pin_memory()):
                placed.views[name] = there
                with pytest.raises(ValueError, match=f"{name}: expected a tensor on "):
                    placed.launch()
            placed.views[name] = on_gpu
        placed.launch()
        assert_same(placed.fetch(), expect(placed.case).flat())


def test_F26_the_current_stream_of_the_pools_device(rng):
    """A transfer sees what was written late on a side stream, and does not wait for the default stream."""
    side, order = torch.cuda.Stream(), torch.arange(64, device="cuda")
    src, late = (torch.zeros(64, 512, dtype=torch.uint8).pin_memory() for _ in range(2))
    late.random_()
    dst, direct_dst = (torch.zeros(64, 512, dtype=torch.uint8, device="cuda") for _ in range(2))
    on_gpu = late.cuda()
    kvcacheio.transfer_kv_per_layer_mla(src, dst, order, order, 512)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        src.copy_(on_gpu, non_blocking=True)
        kvcacheio.transfer_kv_per_layer_mla(src, dst, order, order, 512)
        kvcacheio.transfer_kv_direct([src], [direct_dst], order, order, 16)
    side.synchronize()
    assert not torch.cuda.default_stream().query(), "the call waited for the default stream"
    with torch.cuda.stream(side):
        assert torch.equal(dst.cpu(), late) and torch.equal(direct_dst.cpu(), late)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_graphs_read_what_changes_between_replays(rng, direction):
    for op in OPS:
        shape = shape_of(op, tokens=64)
        placed = Placed(rng, GpuPlace(), make_case(rng, op, shape), direction)
        placed.launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            placed.launch()
        placed.case = placed.case.copy()
        for name, array in placed.case.flat().items():
            array.raw[:] = placed.place.fetch(placed.raws[name])
        for _ in range(3):
            for name, values in zip(("src_indices", "dst_indices"), random_pairs(rng, shape, 48), strict=True):
                placed.case.indices[name].view[:] = values
                placed.views[name].copy_(torch.from_numpy(values))
            torch.cuda.synchronize()
            graph.replay()
            placed.case = expect(placed.case)
            assert_same(placed.fetch(), placed.case.flat())


def test_graphs_of_direct_ops():
    src, dst = torch.randint(0, 256, (64, 48), dtype=torch.uint8).pin_memory(), torch.zeros(64, 48, dtype=torch.uint8)
    dst, order = dst.cuda(), torch.randperm(64)
    on_gpu = order.cuda()
    kvcacheio.transfer_kv_direct([src], [dst], order, order, 1)
    torch.cuda.synchronize()
    dst.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvcacheio.transfer_kv_direct([src], [dst], order, order, 1)
        with pytest.raises(RuntimeError, match="dst_indices: indices on the device are read on the host"):
            kvcacheio.transfer_kv_direct([src], [dst], order, on_gpu, 1)
        with pytest.raises(RuntimeError, match="src_indices: indices on the device are read on the host"):
            kvcacheio.transfer_kv_direct([src], [dst], on_gpu, order, 1)
    assert not dst.any()
    graph.replay()
    assert torch.equal(dst.cpu(), src)


def test_the_first_call_of_a_process_can_be_captured():
    source = """
import torch
from hisparse import kvcacheio
src, dst = torch.arange(64, dtype=torch.uint8).view(4, 16).pin_memory(), torch.zeros(4, 16, dtype=torch.uint8).cuda()
locs = torch.arange(4).cuda()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kvcacheio.transfer_kv_per_layer_mla(src, dst, locs, locs, 16)
assert not dst.any()
graph.replay()
assert (dst.cpu() == src).all()
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=300)


def test_each_device_in_turn_and_the_current_one_stays(rng):
    devices = range(torch.cuda.device_count())
    for current in devices:
        with torch.cuda.device(current):
            for index in devices:
                check(rng, GpuPlace(index), make_case(rng, "transfer_kv_all_layer_lf_pf", shape_of("", tokens=64)))
                assert torch.cuda.current_device() == current


def test_pools_of_two_devices_are_refused(rng):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    a, b = (torch.zeros(8, 64, dtype=torch.uint8, device=f"cuda:{n}") for n in range(2))
    order = torch.arange(8, device="cuda:0")
    with pytest.raises(ValueError, match="src_indices: expected a tensor on"):
        kvcacheio.transfer_kv_per_layer_mla(b, b, order, order, 64)
    with pytest.raises(ValueError, match="src: expected a tensor on"):
        kvcacheio.transfer_kv_per_layer_mla(b, a, order, order, 64)


def test_calls_take_no_device_memory(rng):
    placed = Placed(
        rng, GpuPlace(), make_case(rng, "transfer_kv_all_layer_lf_ph", shape_of("transfer_kv_all_layer_lf_ph"))
    )
    assert_takes_no_device_memory(placed.launch)
