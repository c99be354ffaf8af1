"""Threads, forks, other interpreters, and too little memory, on the CPU target."""

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


def run(script: str, before: str = "", **environment: str) -> subprocess.CompletedProcess:
    code = textwrap.dedent(before) + textwrap.dedent(SETUP) + textwrap.dedent(script)
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
