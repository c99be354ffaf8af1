"""Two GPUs of one host: every op on the one that is not current, and on both at once, from threads and processes.

Skipped where there are fewer than two. ci/two_gpus.sh runs it; test_two_devices.py tests the host's side without a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from placed_calls import KERNEL_CALLS, PLACED_CALLS, swap_in, tensors_of, with_tensor
from places import GpuPlace, Registered, RegisteredPlace, mapped_tensor, torch

import hisparse
import hisparse.kvcacheio as kvcacheio
from hisparse.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch is None or torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]

DEVICES = (0, 1)
MIB = 2**20
TESTS = os.path.dirname(__file__)
EMBEDDING_RANGES = "transfer_embedding_ranges_direct"  # of its tensors only one may be on a GPU
BOTH_SIDES_CALLS = [op for op in PLACED_CALLS if op != EMBEDDING_RANGES]


@pytest.fixture(autouse=True)
def the_current_device_and_streams_stay():
    torch.cuda.set_device(0)
    before = current()
    yield
    assert current() == before


def current():
    return torch.cuda.current_device(), [torch.cuda.current_stream(index) for index in DEVICES]


def run_alone(source: str, *arguments: object) -> None:
    """Runs a script in a process of its own, in which no GPU was used before."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    subprocess.run(command, check=True, timeout=300, cwd=TESTS)


# One device, while another is current


@pytest.mark.parametrize(
    ("op", "direction"),
    [
        *((op, direction) for op in PLACED_CALLS for direction in ("h2d", "d2h")),
        *((op, "d2d") for op in BOTH_SIDES_CALLS),
    ],
)
def test_an_op_runs_on_the_device_of_its_tensors(rng, op, direction):
    for other, used in ((0, 1), (1, 0)):
        with torch.cuda.device(other):
            call = PLACED_CALLS[op](rng, GpuPlace(used), direction)
            before = current()
            call.reset()
            call.launch()
            assert current() == before and before[0] == other
            call.check()


@pytest.mark.parametrize("op", PLACED_CALLS)
def test_checks_of_contents_run_on_the_device_of_the_tensors(rng, op):
    call = PLACED_CALLS[op](rng, GpuPlace(1))
    with hisparse.checking():
        call.reset()
        try:
            call.launch()
        except hisparse.ContentError:  # skipped indices and the like, which some calls have: it was found on cuda:1
            call.check_untouched()
            return
    assert torch.cuda.current_device() == 0
    call.check()


@pytest.mark.parametrize("op", BOTH_SIDES_CALLS)
def test_tensors_on_two_devices_are_refused(rng, op):
    call = PLACED_CALLS[op](rng, GpuPlace(1), "d2d")
    refused = 0
    for name, n, tensor in tensors_of(call.arguments):
        if not tensor.is_cuda:
            continue
        elsewhere = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda:0")
        with pytest.raises(ValueError, match=r"^[\w\[\]]+: expected a tensor on ") as error:
            call.function(**with_tensor(call.arguments, name, n, elsewhere))
        assert set(re.findall(r"(?:cuda|rocm):(\d)", str(error.value))) == {"0", "1"}, error.value
        refused += 1
    assert refused >= 2
    call.check_untouched()
    call.run()


@pytest.mark.parametrize("dst", DEVICES)
@pytest.mark.parametrize("src", DEVICES)
def test_embedding_ranges_from_gpu_to_gpu_are_refused(rng, src, dst):
    call = PLACED_CALLS[EMBEDDING_RANGES](rng, GpuPlace(src), "d2d")
    target = torch.full((20, 9), 7.0, device=f"cuda:{dst}")
    message = f"^dst: expected a tensor on the CPU, since src is on (cuda|rocm):{src}, got one on (cuda|rocm):{dst}$"
    with pytest.raises(ValueError, match=message):
        call.function(**call.arguments | {"dst": target})
    assert (target == 7).all()
    call.check_untouched()


@pytest.mark.parametrize("op", PLACED_CALLS)
def test_F26_the_current_stream_of_the_tensors_device(rng, op):
    """A side stream of cuda:1, set while cuda:0 is current: the call is on it, and waits for no other."""
    call, side = PLACED_CALLS[op](rng, GpuPlace(1)), torch.cuda.Stream(1)
    call.run()
    call.reset()
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(500_000_000)
    busy = torch.cuda.Event()
    busy.record(torch.cuda.default_stream(1))
    torch.cuda.set_stream(side)
    torch.cuda.set_device(0)
    try:
        call.launch()
        assert torch.cuda.current_device() == 0
        side.synchronize()
        assert not busy.query(), "the call waited for the default stream"
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream(1))
        torch.cuda.set_device(0)
    call.check()


@pytest.mark.parametrize("op", PLACED_CALLS)
def test_a_graph_on_the_device_that_is_not_current(rng, op):
    call = PLACED_CALLS[op](rng, GpuPlace(1))
    call.run()
    call.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)), torch.cuda.device(0):
        call.launch()
    call.check_untouched()
    for _ in range(3):
        call.reset()
        graph.replay()
        call.check()


def test_the_first_call_of_a_process_can_be_captured_on_the_second_device():
    run_alone("""
import numpy as np, torch
from placed_calls import copy_items
from places import GpuPlace
call = copy_items(np.random.default_rng(0), GpuPlace(1))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)), torch.cuda.device(0):
    call.launch()
call.check_untouched()
graph.replay()
call.check()
""")


@pytest.mark.skipif(torch is not None and torch.version.hip is not None, reason="a question of CUDA's contexts")
def test_a_process_that_uses_the_second_device_only_has_no_context_on_the_first():
    run_alone("""
import ctypes, numpy as np, torch
from placed_calls import PLACED_CALLS
from places import GpuPlace
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
def contexts():
    for device in (0, 1):
        assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        yield active.value
torch.cuda.set_device(1)
torch.ones(4).pin_memory().to("cuda:1").cpu()
assert list(contexts()) == [0, 1], "torch made one"
for make in PLACED_CALLS.values():
    make(np.random.default_rng(0), GpuPlace(1)).run()
assert list(contexts()) == [0, 1]
""")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_F13_each_device_allows_the_shared_memory_that_a_large_hot_buffer_needs(order):
    run_alone(
        """
import sys, numpy as np, torch
from placed_calls import swap_in
from places import GpuPlace
for index in map(int, sys.argv[1:]):
    swap_in(np.random.default_rng(index), GpuPlace(index), hot=8192, top_k=2048, item=144).run()
    assert torch.cuda.current_device() == 0
""",
        *order,
    )


def test_the_command_line_on_the_second_device(capsys):
    assert main(["verify", "--device", "cuda:1", "--quick"]) == 0
    assert main(["info"]) == 0
    assert capsys.readouterr().out.count(torch.cuda.get_device_name(1)) >= 2


# Both devices at once


def test_two_threads_a_device_each():
    start = threading.Barrier(2)

    def work(index: int) -> int:
        calls = [make(np.random.default_rng(index), GpuPlace(index)) for make in PLACED_CALLS.values()]
        calls.append(swap_in(np.random.default_rng(index), GpuPlace(index), hot=4096, top_k=2048, item=512))
        start.wait(60)
        for _ in range(8):
            for call in calls:
                call.run()
        return torch.cuda.current_device()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, DEVICES)) == [0, 0], "new threads start on cuda:0, and stay there"


def test_two_threads_that_both_use_both_devices():
    """Each thread has its own tensors on both, and goes from one device to the other with every call."""
    start = threading.Barrier(2)

    def work(thread: int) -> int:
        torch.cuda.set_device(thread)
        calls = [
            make(np.random.default_rng(thread), GpuPlace(index)) for make in KERNEL_CALLS.values() for index in DEVICES
        ]
        start.wait(60)
        for _ in range(5):
            for call in calls:
                call.reset()
                call.launch()
            for call in calls:
                call.check()
        return torch.cuda.current_device()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, DEVICES)) == [0, 1]


def test_graphs_of_both_devices_at_once():
    calls = [swap_in(np.random.default_rng(index), GpuPlace(index), hot=4096, top_k=2048) for index in DEVICES]
    graphs = []
    for index, call in zip(DEVICES, calls, strict=True):
        call.run()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=torch.cuda.Stream(index)):
            call.launch()
    for _ in range(10):
        for call in calls:
            call.reset()
        for graph in graphs:
            graph.replay()
        for call in calls:
            call.check()


# Host memory of both


@pytest.mark.parametrize("registered_by", DEVICES)
# Of a translation, all that it reads lies on the device.
@pytest.mark.parametrize("op", [op for op in PLACED_CALLS if op != "translate_padded_hisparse_locations"])
def test_host_memory_registered_once_serves_both_devices(op, registered_by):
    """The same bytes of the same pool: both calls are made alike, and read it at the same time."""
    memory, address = mapped_tensor(4 * MIB)
    with torch.cuda.device(registered_by), Registered(address, 4 * MIB):
        calls = [PLACED_CALLS[op](np.random.default_rng(5), RegisteredPlace(index, memory)) for index in DEVICES]
        for _ in range(3):
            for call in calls:
                call.reset()
            for call in calls:
                call.launch()
            for call in calls:
                call.check()
    for index in DEVICES:
        with pytest.raises(ValueError, match=f"expected host memory that \\w+:{index} can reach"):
            PLACED_CALLS[op](np.random.default_rng(5), RegisteredPlace(index, memory)).launch()


def test_memory_pinned_while_one_device_is_current_serves_both(rng):
    for pinned_by in DEVICES:
        with torch.cuda.device(pinned_by):
            host = torch.from_numpy(rng.integers(0, 256, (64, 512), np.uint8)).pin_memory()
        for index in DEVICES:
            assert kvcacheio.get_device_accessible_ptr(host, index) == host.data_ptr() or torch.version.hip
            order = torch.randperm(64)
            dst = torch.zeros(64, 512, dtype=torch.uint8, device=f"cuda:{index}")
            hisparse.copy_items(host, dst, order.to(dst.device), torch.arange(64, device=dst.device), 512)
            assert torch.equal(dst.cpu(), host[order])


POOL_BYTES, ITEMS, ITEM = 8 * MIB, 4096, 512
SHARED_BYTES = POOL_BYTES + 2 * ITEMS * ITEM


def items_of(process: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(process)
    return torch.randint(0, 256, (ITEMS, ITEM), dtype=torch.uint8, generator=generator)


def in_a_process(index: int, path: str, barrier) -> None:
    """Process `index` on device `index`: both read the first part of the file, and each writes one of the others."""
    with open(path, "r+b") as file:
        memory, address = mapped_tensor(SHARED_BYTES, file.fileno())
    pools, *parts = memory.split([POOL_BYTES, ITEMS * ITEM, ITEMS * ITEM])
    order = torch.randperm(ITEMS, device=f"cuda:{index}")
    with Registered(address, SHARED_BYTES):
        place = RegisteredPlace(index, pools)
        calls = [make(np.random.default_rng(5), place) for make in PLACED_CALLS.values()]
        for round_ in range(5):
            barrier.wait(60)
            for call in calls:
                call.run()
            own, theirs = items_of(2 * round_ + index), items_of(2 * round_ + 1 - index)
            hisparse.copy_items(own.to(order.device), parts[index], order, order, ITEM)
            torch.cuda.synchronize(index)
            barrier.wait(60)
            read = torch.zeros(ITEMS, ITEM, dtype=torch.uint8, device=order.device)
            kvcacheio.transfer_kv_per_layer_mla(parts[1 - index], read, order, order, ITEM)
            assert torch.equal(read.cpu(), theirs)
            barrier.wait(60)
    assert torch.cuda.current_device() == 0


def test_two_processes_share_a_pool_that_both_have_registered():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(SHARED_BYTES)
        barrier = torch.multiprocessing.get_context("spawn").Barrier(2)
        torch.multiprocessing.spawn(in_a_process, (file.name, barrier), nprocs=2)
