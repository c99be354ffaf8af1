"""Every function of the driver fails once, at its first call and later: the error is named, none sticks, and the next
call works."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

HOST = Path(__file__).resolve().parents[1] / "kernels" / "host"
SOURCES = {"cuda": HOST / "cuda_runtime.cpp", "hip": HOST / "hip_runtime.cpp"}

# Functions whose failure a call survives, and why.
SURVIVED = {
    "cuDriverGetVersion": "only `hisparse info` shows it",
    "hipRuntimeGetVersion": "only `hisparse info` shows it",
    "cuGetErrorString": "the message says `unknown error`",
    "hipDrvGetErrorString": "the message says `unknown error`",
    "cuCtxPopCurrent_v2": "the call has done its work",
    "cuMemcpyBatchAsync": "single copies do it",
    "cuMemcpyBatchAsync_v2": "single copies do it",
    "hipMemcpyBatchAsync": "single copies do it",
    "hipMemGetAddressRange": "the ends of the memory are looked at instead",
    "hipGetLastError": "it takes the error away, and reports none of its own",
}

SCENARIO = """
import mmap, warnings
from hisparse import kvcacheio
warnings.simplefilter("ignore")
swap_in = Call(driver, index=1)
pool = np.arange(64, dtype=np.uint8).reshape(4, 16)
driver.map(pool)
indices = np.array([0, 2])
def direct(stream):
    Stream.handles[0] = stream
    out = np.zeros((4, 16), np.uint8)
    kvcacheio.transfer_kv_direct([Tensor(pool, "cpu")], [Tensor(out)], Tensor(indices), indices, 1)
    assert (out[[0, 2]] == pool[[0, 2]]).all()
keep = []
def register():
    spare = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    keep.append(spare)  # what could not be unregistered may not be there again
    with hisparse.register_host_memory(spare, device_index=1) as registration:
        assert registration.target == DEVICE
def transfer():
    other = Tensor(np.zeros((4, 16), np.uint8))
    kvcacheio.transfer_kv_per_layer_mla(Tensor(pool, "cpu"), other, Tensor(indices), Tensor(indices), 16)
def checked():
    with hisparse.checking():
        swap_in()
OPS = {
    "swap_in": lambda: swap_in(blocks_per_request=2),
    "checked": checked,
    "transfer": transfer,
    "batch": lambda: direct(5),
    "single copies": lambda: direct(0),
    "register": register,
    "accessible": lambda: kvcacheio.get_device_accessible_ptr(Tensor(pool, "cpu"), 0),
}
def scenario(name):
    # The errors of all ops, each of which names the function and the code.
    failed = {}
    for op, work in OPS.items():
        try:
            work()
        except RuntimeError as error:
            failed[op] = str(error)
            assert name is not None, (op, error)
            assert f"{name} failed with error 719 (fake error 719)" in failed[op], failed[op]
        if KIND == "hip":
            assert driver.library.fake_last_error() == 0, (op, "leaves an error behind")
        assert driver.library.fake_current() == 0, (op, "leaves another device current")
    assert not hisparse.host_memory._registered
    return failed
def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
def fails(name, at_first_use, survived):
    if not at_first_use:
        scenario(None)
    driver.library.fake_fail(name.encode(), 719)
    failed = scenario(name)
    if at_first_use and not survived:
        assert failed, f"no op noticed that {name} failed"
    assert not survived or not failed, failed
    driver.library.fake_fail(name.encode(), 0)
    scenario(None)
"""


def bound_functions(kind: str) -> list[str]:
    return re.findall(r'\.bind(?:_if_there)?\(library, "(\w+)"\)', SOURCES[kind].read_text())


@pytest.mark.parametrize("at_first_use", [True, False])
def test_every_function_fails_once(run, kind, at_first_use):
    names = bound_functions(kind)
    assert len(names) > 25 and len(set(names)) == len(names)
    script = f"{SCENARIO}\nfor name in {names!r}:\n"
    script += f"    in_child(lambda: fails(name, {at_first_use}, name in {sorted(SURVIVED)!r}))\n"
    run(script)


def test_batches_of_an_older_driver(run, kind):
    if kind == "hip":
        pytest.skip("HIP has one kind of batches")
    run(SCENARIO + "\nfails('cuMemcpyBatchAsync', True, True)\n", "FAKE_CUDA_12")


def test_the_words_of_an_error_that_has_none(run):
    run("""
        driver.fail("cuGetErrorString", "hipDrvGetErrorString", 1)
        driver.fail("cuLaunchKernel", "hipModuleLaunchKernel", 719)
        message = error_of(RuntimeError, Call(driver))
        assert message.endswith(" failed with error 719 (unknown error)"), message
    """)


def test_no_memory_on_the_device(run):
    """The counters of several blocks per request are given up; the report of the check of contents is needed."""
    run("""
        call = Call(driver)
        driver.fail("cuMemAlloc_v2", "hipMalloc", 2)
        call(blocks_per_request=4)
        assert driver.launch.parts == 1
        launches = driver.launches
        with hisparse.checking():
            for _ in range(2):
                assert "error 2 " in error_of(RuntimeError, call)
            assert driver.launches == launches
            driver.fail("cuMemAlloc_v2", "hipMalloc", 0)
            call()
        assert driver.launches == launches + 2
    """)


def test_threads_of_which_some_meet_errors(run):
    """An error is raised in the thread whose call it is of, and in no other."""
    run("""
        import threading
        calls = [Call(driver, index=index % 2) for index in range(8)]
        calls[0]()
        outcomes = [[0, 0] for _ in calls]
        stop = threading.Event()
        def work(number):
            while not stop.is_set():
                try:
                    calls[number](blocks_per_request=1)
                    outcomes[number][0] += 1
                except RuntimeError as error:
                    assert "error 719" in str(error), error
                    outcomes[number][1] += 1
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            driver.fail("cuLaunchKernel", "hipModuleLaunchKernel", 719)
            driver.fail("cuLaunchKernel", "hipModuleLaunchKernel", 0)
        stop.set()
        for thread in threads:
            thread.join()
        for call in calls:
            call()
        launched = sum(good for good, _ in outcomes) + sum(bad for _, bad in outcomes) + 9
        assert driver.launches == launched, (driver.launches, launched)
    """)


@pytest.mark.parametrize("kind", ["cuda"], indirect=True)
def test_a_driver_that_hangs_does_not_keep_the_process(run):
    """The end waits for half a minute. A call that comes back later still is stopped where it asks for the GIL."""
    started = time.monotonic()
    run("""
        import threading, time
        class Late:
            def __del__(self, sleep=time.sleep):
                sleep(6)  # the call comes back while the interpreter is torn down
        call = Call(driver)
        call()
        driver.library.fake_hang(b"cuLaunchKernel", 33)
        threading.Thread(target=call, daemon=True).start()
        time.sleep(1)
        keep = Late()
    """)
    assert 36 < time.monotonic() - started < 90
