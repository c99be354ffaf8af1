"""The host's side of several GPUs, against a fake driver with two of them: what is done per device, and where.

test_two_gpus.py runs the ops themselves on two GPUs.
"""

from __future__ import annotations

import textwrap

import pytest

SETUP = """
import re
from hisparse import kvcacheio
from placed_calls import DIRECT_CALLS, PLACED_CALLS, tensors_of, with_tensor
places = [Place(driver, index) for index in (0, 1)]
def make(op, index, direction="h2d"):
    return PLACED_CALLS[op](np.random.default_rng(3), places[index], direction)
WITH_A_DEVICE_CURRENT = [
    ("cuModuleLoadData", "hipModuleLoadData"),
    ("cuModuleGetFunction", "hipModuleGetFunction"),
    ("cuMemAlloc_v2", "hipMalloc"),
    ("cuMemsetD8Async", "hipMemsetD8Async"),
    ("cuStreamCreate", "hipStreamCreateWithFlags"),
    ("cuPointerGetAttributes", "hipHostGetDevicePointer"),
    ("cuStreamIsCapturing", "hipStreamIsCapturing"),
    ("cuStreamGetId", "hipStreamGetId"),
    ("cuMemcpyBatchAsync_v2", "hipMemcpyBatchAsync"),
    ("cuMemcpyAsync", "hipMemcpyAsync"),
    ("cuLaunchKernel", "hipModuleLaunchKernel"),
]
"""


@pytest.fixture
def run_both(run):
    def run_both(script: str) -> None:
        run(SETUP + textwrap.dedent(script))

    return run_both


def test_an_op_runs_on_the_device_of_its_tensors(run_both):
    run_both("""
        Stream.handles.update({0: 55, 1: 77})
        for current in (0, 1):
            driver.library.fake_set_current(current)
            for index in (1, 0):
                for op in PLACED_CALLS:
                    call = make(op, index)
                    launches, copied = driver.launches, driver.library.fake_copied()
                    call.launch()
                    assert driver.library.fake_current() == current
                    if op in DIRECT_CALLS:
                        assert driver.library.fake_copied() > copied, op
                        call.check()
                    else:
                        launch = driver.launch_on(index)
                        assert (launch.device, launch.stream) == (index, 77 if index else 55), op
                        assert driver.launches == launches + 1
                        assert driver.launch.device == index, op
    """)


def test_checks_of_contents_run_on_the_device_of_the_tensors(run_both):
    run_both("""
        with hisparse.checking():
            for op in PLACED_CALLS:
                make(op, 1).launch()
                assert driver.library.fake_current() == 0
        assert driver.count_on(1, "cuLaunchKernel", "hipModuleLaunchKernel") == driver.launches > len(PLACED_CALLS)
        for name in WITH_A_DEVICE_CURRENT:
            assert driver.count_on(0, *name) == 0, name
    """)


def test_a_device_that_is_not_used_is_left_alone(run_both):
    run_both("""
        for index, current in ((1, 0), (0, 1)):  # the second device first
            driver.library.fake_set_current(current)
            for op in reversed(PLACED_CALLS):
                make(op, index).launch()
                Stream.handles[index] = 5  # no batches of copies on the default stream
            Call(driver, index)(blocks_per_request=2)  # takes counters of its stream
            for name in WITH_A_DEVICE_CURRENT:
                assert driver.count_on(index, *name) > 0, name
                assert index == 0 or driver.count_on(0, *name) == 0, name
            if KIND == "cuda":
                assert driver.library.fake_count(b"cuDevicePrimaryCtxRetain") == 2 - index
    """)


def test_tensors_on_two_devices_are_refused(run_both):
    run_both("""
        for op in PLACED_CALLS:
            call = make(op, 1, "d2d")
            refused = 0
            for name, n, tensor in tensors_of(call.arguments):
                if tensor.device.type != "cuda":
                    continue
                elsewhere = with_tensor(call.arguments, name, n, Tensor(tensor.array, "cuda", 0))
                message = error_of(ValueError, call.function, **elsewhere)
                assert re.match(r"[\\w\\[\\]]+: expected a tensor on ", message), message
                assert set(re.findall(DEVICE + r":(\\d)", message)) == {"0", "1"}, (op, name, message)
                refused += 1
            assert refused >= 2, op
        assert driver.launches == driver.library.fake_copied() == 0
    """)


def test_F13_shared_memory_is_a_device_s_own(run_both):
    """The attribute that allows more of it is set on each, to what each has."""
    run_both("""
        for small in (0, 1):
            driver.library.fake_set_shared_on(small, 30000)
        driver.library.fake_set_shared_on(0, 200_000)
        first, second = (Call(driver, index, top_k=64, hot=12000) for index in (0, 1))
        message = error_of(ValueError, second)
        wanted = f"a block's 30000 bytes of shared memory on {DEVICE}:1"
        assert wanted in message and re.search(r"which need \\d{5} bytes", message), message
        first()
        assert 30000 < driver.launch.shared_bytes <= 200_000
        assert wanted in error_of(ValueError, second)
        Call(driver, 1, top_k=64, hot=2000)()
        assert driver.launch.device == 1 and driver.launch.shared_bytes <= 30000
        if KIND == "cuda":
            per_device = [driver.library.fake_count_on(b"cuFuncSetAttribute", index) for index in (0, 1)]
            kernels = [driver.library.fake_count_on(b"cuModuleGetFunction", index) for index in (0, 1)]
            assert per_device == kernels and kernels[0] == kernels[1] > 2
    """)


def test_F21_host_memory_has_an_address_per_device(run_both):
    run_both("""
        calls = [Call(driver, index, mapped=False) for index in (0, 1)]
        pool = calls[0].arrays["host_cache"]
        tensor = Tensor(pool, "cpu")
        driver.map_on(1, pool, 2 * HOST_LOC_STEP)
        message = error_of(ValueError, calls[0], host_cache=tensor)
        assert message.startswith(f"host_cache: expected host memory that {DEVICE}:0 can reach"), message
        calls[1](host_cache=tensor)
        assert driver.library.fake_host_cache() == pool.ctypes.data + 2 * HOST_LOC_STEP
        driver.map_on(0, pool, HOST_LOC_STEP)
        for index in (0, 1, 0):
            address = pool.ctypes.data + (index + 1) * HOST_LOC_STEP
            calls[index](host_cache=tensor)
            assert driver.library.fake_host_cache() == address
            assert kvcacheio.get_device_accessible_ptr(tensor, index) == address
        assert driver.library.fake_current() == 0
    """)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_device_that_fails_does_not_hold_up_the_other(run_both, broken):
    run_both(f"""
        broken, other = {broken}, 1 - {broken}
        driver.library.fake_set_current(other)
        calls = [Call(driver, index, batch=1) for index in (0, 1)]
        two_blocks = dict(blocks_per_request=2)
        for name in WITH_A_DEVICE_CURRENT:
            if "Memcpy" in name[0] or "MemAlloc" in name[0]:
                continue
            driver.fail_on(broken, *name, 719)
            message = error_of(RuntimeError, calls[broken], **two_blocks)
            assert driver.name(*name).decode() + " failed with error 719" in message, message
            launches = driver.launches
            calls[other](**two_blocks)
            assert driver.launches == launches + 1 and driver.launch.device == other
            assert driver.library.fake_current() == other
            driver.fail_on(broken, *name, 0)
        calls[broken](**two_blocks)
        assert driver.launch.device == broken
    """)


def test_counters_are_a_device_s_own(run_both):
    run_both("""
        Stream.handles.update({0: 5, 1: 5})  # the same handle on both
        seen = [set(), set()]
        for _ in range(3):
            for index in (0, 1):
                Call(driver, index)(blocks_per_request=2)
                seen[index].add(driver.arrivals)
        assert len(seen[0]) == len(seen[1]) == 1 and seen[0] != seen[1]
        driver.library.fake_capture(1)
        for index in (0, 1, 0):
            Call(driver, index)(blocks_per_request=2)
            seen[index].add(driver.arrivals)
        assert (len(seen[0]), len(seen[1])) == (3, 2) and not seen[0] & seen[1]
        assert [driver.count_on(index, "cuMemAlloc_v2", "hipMalloc") for index in (0, 1)] == [1, 1]
    """)


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_on_both_devices(run_both, threads):
    """The first calls of all threads come at once; the driver refuses a launch on a device that is not current."""
    run_both(f"""
        import threading
        from concurrent.futures import ThreadPoolExecutor
        start = threading.Barrier({threads})
        def work(thread):
            driver.library.fake_set_current(thread // 2 % 2)
            start.wait(60)
            for i in range(200):
                calls[(thread + i // 3) % 2](blocks_per_request=2)
            return driver.library.fake_current()
        calls = [Call(driver, index) for index in (0, 1)]
        with ThreadPoolExecutor({threads}) as pool:
            assert list(pool.map(work, range({threads}))) == [thread // 2 % 2 for thread in range({threads})]
        assert driver.launches == 200 * {threads}
        for name in (("cuModuleLoadData", "hipModuleLoadData"), ("cuMemAlloc_v2", "hipMalloc")):
            assert [driver.count_on(index, *name) for index in (0, 1)] == [1, 1]
        if KIND == "cuda":
            assert driver.library.fake_count(b"cuDevicePrimaryCtxRetain") == 2
            assert driver.library.fake_count(b"cuCtxPushCurrent_v2") == driver.library.fake_count(b"cuCtxPopCurrent_v2")
    """)
