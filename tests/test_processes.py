"""Threads, forks, the end of the interpreter, other interpreters, and too little memory, on the CPU target."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import hisparse

CALLS_PER_THREAD = int(os.environ.get("HISPARSE_TEST_CALLS_PER_THREAD", 10_000))
SETUP = """
    import os, sys, threading, time
    import numpy as np
    import hisparse
    src = np.arange(64, dtype=np.uint8).reshape(4, 16)
    index = np.array([3, 1, 0, 2])
    def call():
        dst = np.zeros((4, 16), np.uint8)
        hisparse.copy_items(src, dst, index, np.arange(4), 16)
        assert (dst == src[index]).all()
"""
TESTS = Path(__file__).resolve().parent


def run(script: str, **environment: str) -> subprocess.CompletedProcess:
    code = textwrap.dedent(SETUP) + textwrap.dedent(script)
    path = os.pathsep.join([str(Path(hisparse.__file__).parent.parent), str(TESTS)])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=variables, capture_output=True, text=True, timeout=200
    )


def test_threads_that_call_at_once():
    """8 threads, each with a state of its own: every call's result is that of its own arguments."""
    failures = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        src = rng.integers(0, 256, (8, 12), np.uint8)
        index, order = np.arange(4), np.arange(4)
        dst = np.zeros((4, 12), np.uint8)
        try:
            for n in range(CALLS_PER_THREAD):
                index[:] = rng.integers(0, 8, 4) if n % 100 == 0 else (index + n) % 8
                hisparse.copy_items(src, dst, index, order, 12)
                if not (dst == src[index]).all():
                    raise AssertionError(f"call {n} of thread {seed}")
                if n % 1000 == 0:
                    with pytest.raises(ValueError):
                        hisparse.copy_items(src, dst, index, order, 1000)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_gil_is_released_around_a_launch():
    """Else the main thread would not get to run until the last of the calls is over."""
    rows, hot = 4, 8192
    length = 2 * hot
    state = {
        "top_k_tokens": np.tile(np.arange(2048, dtype=np.int32), (rows, 1)),
        "device_buffer_tokens": np.full((rows, hot + 1), -1, np.int32),
        "host_cache_locs": np.tile(np.arange(length), (rows, 1)),
        "device_buffer_locs": np.arange(rows * (hot + 1), dtype=np.int32).reshape(rows, hot + 1),
        "host_cache": np.zeros((length, 16), np.uint8),
        "device_buffer": np.zeros((rows * (hot + 1), 16), np.uint8),
        "top_k_device_locs": np.zeros((rows, 2048), np.int32),
        "req_pool_indices": np.arange(rows),
        "seq_lens": np.full(rows, length),
        "lru_slots": np.tile(np.arange(hot, dtype=np.int16), (rows, 1)),
    }
    done, seen = threading.Event(), 0

    def work() -> None:
        for _ in range(5):
            hisparse.load_cache_to_device_buffer_mla(
                **state, item_size_bytes=16, num_top_k=2048, hot_buffer_size=hot, block_size=1024
            )
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody has to give up the GIL unless it releases it
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while not done.wait(0.0005):
            seen += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen >= 5


@pytest.mark.parametrize("before", ["", "call()", "with hisparse.checking(): call()"])
def test_a_fork_works_before_and_after_first_use(before):
    result = run(f"""
        {before}
        child = os.fork()
        call()
        if child == 0:
            sys.exit(0)  # its interpreter ends as usual
        assert os.waitpid(child, 0)[1] == 0
        call()
        print("done")
    """)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_multiprocessing_with_each_start_method(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(SETUP)
        + textwrap.dedent("""
        import multiprocessing
        def work(_):
            call()
            return os.getpid()
        if __name__ == "__main__":
            call()
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    assert os.getpid() not in pool.map(work, range(4))
            print("done")
    """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(hisparse.__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", script], env=environment, capture_output=True, text=True, timeout=200
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


# The end


@pytest.mark.parametrize("work", ["call()", "hisparse.load(8)"])
@pytest.mark.parametrize("after", ["", "sys.exit(0)", "import atexit; atexit.register(call)"])
def test_the_end_of_the_interpreter_with_daemon_threads_in_calls(work, after):
    """Without the wait at exit, the interpreter stops such a thread in a destructor, and the process aborts."""
    result = run(f"""
        wide = np.zeros((4096, 64), np.uint8)
        rows = np.arange(4096)
        hisparse.load = lambda n: [hisparse.copy_items(wide, wide.copy(), rows, rows, 64) for _ in range(n)]
        def work():
            while True:
                {work}
        for _ in range(6):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
        print("end", flush=True)
        {after}
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_end_of_the_interpreter_with_every_op_in_daemon_threads(library):
    """Sizes are NumPy's integers and tensors have floats: Python code and torch are asked about them.

    An op whose output its caller's library allocates, with code that the interpreter may stop, is refused.
    """
    if library == "torch":
        pytest.importorskip("torch")
    result = run(f"""
        library = "{library}"
        if library == "torch":
            import torch
        from right_calls import RIGHT_CALLS, public_ops

        def given(value):
            if isinstance(value, list) and isinstance(value[0], np.ndarray):
                return [given(item) for item in value]
            if type(value) is int:
                return np.int64(value)
            if library == "numpy" or not isinstance(value, np.ndarray):
                return value
            tensor = torch.from_numpy(value)
            is_pool = tensor.dtype is torch.uint8 and tensor.ndim > 1 and tensor.shape[-1] % 2 == 0
            return tensor.view(torch.float16) if is_pool else tensor

        def work(name, op, arguments):
            op(**arguments)
            running.add(name)
            try:
                while True:
                    op(**arguments)
            except RuntimeError as error:
                if name != "translate_padded_hisparse_locations" or "the interpreter's end" not in str(error):
                    raise

        running, calls = set(), []
        sys.setswitchinterval(1e-5)
        for name, op in public_ops().items():
            calls.append(RIGHT_CALLS[name]())  # kept: tables of addresses do not hold what they name
            arguments = {{key: given(value) for key, value in calls[-1].items()}}
            for _ in range(2):
                threading.Thread(target=work, args=(name, op, arguments), daemon=True).start()
        deadline = time.monotonic() + 100
        while running != set(public_ops()):
            assert time.monotonic() < deadline, set(public_ops()) - running
            time.sleep(0.01)
        print("end", flush=True)
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_calls_after_the_end_has_begun(library):
    """All work in the thread that ends; in another, all but the one that allocates."""
    if library == "torch":
        pytest.importorskip("torch")
    result = run(f"""
        import atexit
        mapping, locations, floats = np.arange(9), np.array([7, -1]), np.ones((4, 16), np.float32)
        if "{library}" == "torch":
            import torch
            mapping, locations, floats = map(torch.from_numpy, (mapping, locations, floats))
        def work():
            call()
            hisparse.copy_items(floats, floats, index, index, 64)
            return hisparse.translate_padded_hisparse_locations(mapping, locations).tolist()
        def work_beside():
            try:
                print(work())
            except RuntimeError as error:
                print(error)
        def threads():
            thread = threading.Thread(target=work_beside)
            thread.start()
            thread.join()
        threads()
        atexit._run_exitfuncs()
        print(work(), flush=True)
        threads()
    """)
    refusal = "translate_padded_hisparse_locations: cannot allocate an output: the interpreter's end has begun"
    assert (result.returncode, result.stdout, result.stderr) == (0, f"[7, -1]\n[7, -1]\n{refusal}\n", "")


def test_the_end_of_a_fork_of_a_process_in_calls():
    """The child has none of the calls that it would have to wait for."""
    result = run("""
        def work():
            while True:
                call()
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        start = time.monotonic()
        for _ in range(5):
            child = os.fork()
            if child == 0:
                call()
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert time.monotonic() - start < 25, time.monotonic() - start
        print("done", flush=True)
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_calls_in_finalizers_at_the_end():
    result = run("""
        class Late:
            def __del__(self, copy_items=hisparse.copy_items, src=src, dst=np.zeros((4, 16), np.uint8), index=index):
                copy_items(src, dst, index, index, 16)
                assert (dst == src).all()
                print("late", flush=True)
        call()
        keep = Late()
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "late\n", "")


# Other interpreters


def test_a_sub_interpreter_is_refused():
    result = run("""
        import faulthandler
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            import _interpreters as interpreters
        for isolated in (True, False):
            try:
                other = interpreters.create(isolated=isolated)
            except TypeError:
                other = interpreters.create("isolated" if isolated else "legacy")
            text = "import sys; sys.path[:] = " + repr(sys.path) + chr(10) + (
                "try:" + chr(10) + "    import hisparse._C" + chr(10) + "except ImportError as error:" + chr(10)
                + "    assert 'interpreter' in str(error), error" + chr(10) + "else:" + chr(10) + "    assert False"
            )
            failed = interpreters.run_string(other, text)
            assert failed is None, failed
            interpreters.destroy(other)
        call()
        print("done")
    """)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


# Memory


def test_too_little_memory_is_an_error_and_no_end():
    """The stacks of a block's threads do not fit: MemoryError, and the next call with room for them works."""
    result = run("""
        import resource
        def used():
            return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        src = np.arange(1 << 16, dtype=np.uint8).reshape(4096, 16)
        dst, rows = np.zeros_like(src), np.arange(4096)
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used() + (1 << 20), unlimited[1]))
        for _ in range(3):
            try:
                hisparse.copy_items(src, dst, rows, rows, 16)
            except MemoryError:
                assert not dst.any()
            else:
                raise AssertionError("no MemoryError")
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        hisparse.copy_items(src, dst, rows, rows, 16)
        assert (dst == src).all()
        print("done")
    """)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
