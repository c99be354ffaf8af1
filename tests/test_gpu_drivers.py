"""The GPU targets' host side against a fake driver: what is called, in which order, and what becomes of its errors.

Each test runs in a process of its own, which finds the fake driver in the real one's place and a stand-in for torch.
"""

from __future__ import annotations

import pytest
from driver_fixtures import KINDS

import hisparse

# Getting at the driver


def test_import_touches_no_driver(run):
    run("""
        assert driver.count("cuInit", "hipInit") == 0
        assert hisparse.build_info()["version"] == hisparse.__version__
        assert driver.count("cuInit", "hipInit") == 0
    """)


def test_a_library_that_is_not_there(run, kind):
    target, label = KINDS[kind]
    run(
        f"""
        from hisparse import _C
        (found,) = (t for t in _C.targets() if t["target"] == {target!r})
        assert found["devices"] == [] and found["unavailable"].startswith("no {label} driver: "), found
        assert "/nowhere/libdriver.so" in found["unavailable"]
        """,
        library="/nowhere/libdriver.so",
    )


def test_a_missing_symbol(run):
    run(
        """
        message = error_of(RuntimeError, Call(driver))
        assert message == LIBRARY + " has no " + driver.name("cuLaunchKernel", "hipModuleLaunchKernel").decode() + (
            ": a newer driver is needed"), message
        """,
        "FAKE_WITHOUT_LAUNCH",
    )


def test_no_device(run, kind):
    run(f"""
        driver.library.fake_setup(0, 65536)
        assert error_of(RuntimeError, Call(driver)) == "no {KINDS[kind][1]} device: the driver reports none"
        driver.fail("cuInit", "hipInit", 100)
        assert error_of(RuntimeError, Call(driver)) == "no {KINDS[kind][1]} device: the driver reports none"
    """)


def test_a_device_number_past_the_last(run, kind):
    run(f"""
        assert error_of(RuntimeError, Call(driver, index=2)) == "no {KINDS[kind][1]} device 2: the driver reports 2"
    """)


def test_the_devices(run, kind):
    archs = {"cuda": ["sm_75", "sm_76"], "hip": ["gfx942", "gfx950"]}[kind]
    run(f"""
        from hisparse import _C
        (found,) = (t for t in _C.targets() if t["target"] == DEVICE)
        assert found["unavailable"] is None
        assert [d["arch"] for d in found["devices"]] == {archs!r}, found
        assert [d["index"] for d in found["devices"]] == [0, 1]
        assert found["devices"][1] == dict(index=1, name="Fake GPU", arch={archs[1]!r}, warp_size=32,
            max_threads_per_block=1024, multiprocessors=10, shared_memory_bytes=65536)
        # Looking at devices neither makes a context nor loads code.
        assert driver.count("cuDevicePrimaryCtxRetain", "hipSetDevice") == 0
        assert driver.count("cuModuleLoadData", "hipModuleLoadData") == 0
    """)


# Errors of the driver


AT_FIRST_USE = [
    ("cuInit", "hipInit"),
    ("cuDeviceGetCount", "hipGetDeviceCount"),
    ("cuDeviceGetName", "hipDeviceGetName"),
    ("cuDeviceGetAttribute", "hipGetDevicePropertiesR0600"),
    ("cuDevicePrimaryCtxRetain", "hipDeviceGetAttribute"),
    ("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"),
    ("cuModuleLoadData", "hipModuleLoadData"),
    ("cuModuleGetFunction", "hipModuleGetFunction"),
    ("cuFuncSetAttribute", "hipStreamCreateWithFlags"),
    ("cuMemsetD8Async", "hipMemsetD8Async"),
    ("cuStreamSynchronize", "hipStreamSynchronize"),
]
AT_EACH_CALL = [
    ("cuCtxGetCurrent", "hipGetDevice"),
    ("cuCtxPushCurrent_v2", "hipSetDevice"),
    ("cuPointerGetAttributes", "hipHostGetDevicePointer"),
    ("cuStreamIsCapturing", "hipStreamIsCapturing"),
    ("cuStreamGetId", "hipStreamGetId"),
    ("cuLaunchKernel", "hipModuleLaunchKernel"),
]


def test_error_codes(run):
    run(f"""
        swap_in = Call(driver, index=1)
        def call():
            swap_in(blocks_per_request=2)
        def fails(cuda, hip):
            driver.fail(cuda, hip, 719)
            message = error_of(RuntimeError, call)
            assert driver.name(cuda, hip).decode() + " failed with error 719 (fake error 719)" in message, message
            assert KIND == "cuda" or driver.library.fake_last_error() == 0
            assert driver.library.fake_current() == 0
            driver.fail(cuda, hip, 0)
        for name in {AT_FIRST_USE}:
            fails(*name)
        for name in {AT_EACH_CALL}:
            launches = driver.launches
            call()
            assert driver.launches == launches + 1
            fails(*name)
        call()
    """)


def test_a_device_that_the_image_has_no_code_for(run, kind):
    archs = hisparse.build_info()["cuda_archs" if kind == "cuda" else "rocm_archs"]
    arch = {"cuda": "sm_75", "hip": "gfx942"}[kind]
    run(f"""
        driver.fail("cuModuleLoadData", "hipModuleLoadData", 209)
        message = error_of(RuntimeError, Call(driver))
        assert message.startswith("hisparse was built for {";".join(archs)}; device 0 is {arch}: "), message
        assert "error 209" in message
    """)


def test_no_room_for_counters(run):
    run("""
        driver.fail("cuMemAlloc_v2", "hipMalloc", 2)
        Call(driver)(blocks_per_request=4)
        assert (driver.launch.blocks, driver.launch.parts) == (2, 1)
        assert KIND == "cuda" or driver.library.fake_last_error() == 0
    """)


# The launch


def test_the_launch(run):
    run("""
        Stream.handles[1] = 77
        call = Call(driver, index=1, batch=3, top_k=40, hot=1000)
        call(block_size=64, blocks_per_request=1)
        launch = driver.launch
        assert (launch.blocks, launch.parts, launch.threads, launch.device, launch.stream) == (3, 1, 256, 1, 77)
        assert 4000 < launch.shared_bytes <= 65536
        call(block_size=512)
        assert driver.launch.threads == 512
        assert (driver.launch.blocks, driver.launch.parts) == (3, 1)
        call(blocks_per_request=64)
        assert driver.launch.parts == 64
        # Up to eight blocks copy for each of up to three rows, no more than the ten that run at once, nor than words.
        for batch, item, parts in (1, 4096, 8), (2, 4096, 5), (3, 4096, 3), (4, 4096, 1), (1, 16, 1):
            Call(driver, index=1, batch=batch, top_k=40, hot=1000, item=item)()
            assert (driver.launch.blocks, driver.launch.parts) == (batch, parts)
    """)


def test_shared_memory(run):
    run("""
        driver.library.fake_setup(2, 30000)
        call = Call(driver, top_k=64, hot=12000)
        message = error_of(ValueError, call)
        assert message.startswith("num_top_k, hot_buffer_size: expected a plan that fits in a block's 30000 bytes")
        assert driver.launches == 0
        Call(driver, top_k=1000, hot=2000)()  # the token table shrinks until it fits
        assert 20000 < driver.launch.shared_bytes <= 30000
    """)


def test_the_current_device_stays(run):
    run("""
        first, second = Call(driver, index=0), Call(driver, index=1)
        for current in (0, 1):
            driver.library.fake_set_current(current)
            for index, call in enumerate((first, second)):
                call()
                assert driver.launch.device == index
                assert driver.library.fake_current() == current
        assert driver.count("cuModuleLoadData", "hipModuleLoadData") == 2
        if KIND == "cuda":
            kernels = driver.library.fake_count(b"cuModuleGetFunction")
            assert driver.library.fake_count(b"cuFuncSetAttribute") == kernels > 2
            driver.library.fake_set_current(-1)  # a thread without a context
            first()
            assert driver.library.fake_current() == -1
            pushes = driver.library.fake_count(b"cuCtxPushCurrent_v2")
            driver.library.fake_set_current(0)
            first()
            assert driver.library.fake_count(b"cuCtxPushCurrent_v2") == pushes
    """)


def test_an_empty_batch_launches_nothing(run):
    run("""
        call = Call(driver, batch=0)
        call()
        assert driver.launches == 0
        assert "block_size" in error_of(ValueError, call, block_size=33)
        indices = Tensor(np.zeros(0, np.int64))
        pool = Tensor(np.zeros(64, np.uint8))
        hisparse.copy_items(pool, pool, indices, indices, 16)
        assert driver.launches == 0
    """)


def test_copy_items(run):
    run("""
        host = np.zeros((64, 16), np.uint8)
        driver.map(host)
        src, dst = Tensor(host, "cpu"), Tensor(np.zeros((64, 16), np.uint8))
        for count, blocks in ((1, 1), (8, 1), (9, 2), (10_000, 40)):
            indices = Tensor(np.zeros(count, np.int64))
            hisparse.copy_items(src, dst, indices, indices, 16)
            hisparse.copy_items(dst, src, indices, indices, 16)
            assert (driver.launch.blocks, driver.launch.threads) == (blocks, 256), (count, driver.launch.blocks)
    """)


# Host memory


def test_host_memory_has_another_address_on_the_device(run):
    run("""
        call = Call(driver)
        call()
        assert driver.library.fake_host_cache() == call.arrays["host_cache"].ctypes.data + HOST_LOC_STEP
    """)


def test_host_memory_in_pieces(run):
    run("""
        call = Call(driver, mapped=False)
        pool = call.arrays["host_cache"]
        refused = lambda: error_of(ValueError, call).startswith(
            f"host_cache: expected host memory that {DEVICE}:0 can reach (pinned or registered), "
            "got memory of which at least a part is not device accessible (1024 bytes at ")
        assert refused()
        for pieces in ([(0, 1023)], [(1, 1024)], [(0, 500), (501, 1024)], [(0, 500), (500, 1023)]):
            driver.library.fake_unmap_all()
            for piece in pieces:
                driver.map(pool, *piece)
            assert refused(), pieces
        driver.library.fake_unmap_all()
        driver.map(pool, 0, 512)
        driver.map(pool, 512, 1024, shift=HOST_LOC_STEP + 4096)  # elsewhere on the device
        assert refused()
        assert driver.launches == 0 and (KIND == "cuda" or driver.library.fake_last_error() == 0)
        driver.library.fake_unmap_all()
        for piece in ((512, 700), (0, 512), (700, 1024)):
            driver.map(pool, *piece)
        call()
        assert driver.launches == 1
    """)


def test_device_memory_needs_no_mapping(run):
    run("""
        call = Call(driver, mapped=False)
        host_cache = Tensor(call.arrays["host_cache"])
        call(host_cache=host_cache)
        assert driver.library.fake_host_cache() == host_cache.data_ptr()
    """)


def test_every_tensor_is_on_the_device_of_device_buffer(run):
    run("""
        arrays = Call(driver).arrays | {
            "num_real_reqs": np.zeros(1, np.int32),
            "miss_src": np.zeros((2, 4), np.int64),
            "miss_dst": np.zeros((2, 4), np.int32),
            "miss_count": np.zeros(2, np.int32),
        }
        valid = on_device(arrays)
        driver.map(arrays["host_cache"])
        for name, value in arrays.items():
            if not isinstance(value, np.ndarray) or name == "device_buffer":
                continue
            others = ("cpu", Tensor(value, "cpu")), ("cpu", value), (DEVICE + ":1", Tensor(value, "cuda", 1))
            for there, tensor in others:
                if name == "host_cache" and there == "cpu":
                    continue
                wanted = f"{name}: expected a tensor on {DEVICE}:0, where device_buffer is, got one on {there}"
                assert error_of(ValueError, call_op, **valid | {name: tensor}) == wanted
        assert "mps" in error_of(TypeError, call_op, **valid | {"seq_lens": Tensor(arrays["seq_lens"], "mps")})
        call_op(**valid)
        assert driver.launches == 1

        pool, indices = np.zeros(64, np.uint8), np.zeros(2, np.int64)
        for wrong in ("src_indices", "dst_indices"):
            given = {"src_indices": Tensor(indices), "dst_indices": Tensor(indices), wrong: indices}
            message = error_of(ValueError, hisparse.copy_items, Tensor(pool), Tensor(pool), **given, item_size_bytes=4)
            assert message == f"{wrong}: expected a tensor on {DEVICE}:0, where dst is, got one on cpu"
        assert "one on cpu" in error_of(ValueError, hisparse.copy_items, pool, Tensor(pool), indices, indices, 4)
        assert driver.launches == 1
    """)


# Arrival counters


@pytest.mark.parametrize("define", ["", "FAKE_OLD_DRIVER"])
def test_counters_of_streams(run, define):
    run(
        """
        call = Call(driver)
        def counters(stream, **sizes):
            Stream.handles[0] = stream
            (Call(driver, **sizes) if sizes else call)(blocks_per_request=2)
            assert driver.launch.stream == (stream or None) and driver.launch.parts == 2
            return driver.arrivals
        assert counters(5) == counters(5) != counters(6) == counters(6)
        assert counters(0) not in (counters(5), counters(6))
        assert counters(5, batch=3) == counters(5)
        large = counters(5, batch=100)
        assert large == counters(5) and not any((ctypes.c_uint32 * 100).from_address(large))
        assert driver.count("cuMemAlloc_v2", "hipMalloc") == 1
        """,
        *([define] if define else []),
    )


def test_counters_of_graphs(run):
    run("""
        call = Call(driver)
        driver.library.fake_capture(1)
        seen = []
        for _ in range(4):
            call(blocks_per_request=2)  # the first one loads everything while the stream is captured
            seen.append(driver.arrivals)
        driver.library.fake_capture(0)
        call(blocks_per_request=2)
        seen.append(driver.arrivals)
        call(blocks_per_request=2)
        assert driver.arrivals == seen[-1] and len(set(seen)) == 5 and 0 not in seen
        assert driver.count("cuMemAlloc_v2", "hipMalloc") == 1
    """)


def test_counters_run_out(run):
    run("""
        call = Call(driver, batch=200_000, top_k=1, hot=1)
        driver.library.fake_capture(1)
        parts = []
        for _ in range(7):
            call(blocks_per_request=2)
            parts.append(driver.launch.parts)
        assert driver.launch.blocks == 200_000 and parts == [2] * 5 + [1] * 2
        assert driver.count("cuMemAlloc_v2", "hipMalloc") == 1
    """)


# The check of contents


def test_the_check_of_contents(run):
    run("""
        import ctypes
        call = Call(driver, index=1)
        call()
        allocations = driver.count("cuMemAlloc_v2", "hipMalloc")
        assert driver.library.fake_checks() == 0
        with hisparse.checking():
            for _ in range(3):
                call()
            assert driver.library.fake_checks() == 3 and driver.launch.device == 1
            assert driver.count("cuMemAlloc_v2", "hipMalloc") == allocations + 1
            assert driver.library.fake_last_error() != 999

            call.arrays["lru_slots"][3] = 9
            call.arrays["req_pool_indices"][:] = 2, 3
            launches = driver.launches
            driver.library.fake_fault(6, ctypes.c_uint64(1 << 32 | 5))
            message = error_of(hisparse.ContentError, call)
            assert message == (
                "lru_slots: expected a permutation of 0 to 7, got 9 at [3, 5] (row 1 of the batch)"), message
            assert driver.launches == launches + 1  # the check alone
            call()

            indices = Tensor(np.arange(3) + 7)
            pool = Tensor(np.zeros(64, np.uint8))
            driver.library.fake_fault(10, ctypes.c_uint64(2))
            message = error_of(hisparse.ContentError, hisparse.copy_items, pool, pool, indices, indices, 16)
            assert message == "dst_indices: expected less than 4, the items of the destination, got 9 at [2]", message

            launches = driver.launches
            driver.library.fake_capture(1)
            assert "a graph cannot capture" in error_of(RuntimeError, call)
            assert driver.launches == launches
            driver.library.fake_capture(0)

        driver.library.fake_capture(1)
        call()
        driver.library.fake_capture(0)
        assert driver.library.fake_checks() == 6
    """)


# Processes and threads


def test_fork(run, kind):
    run(f"""
        import warnings
        def in_child(work):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                child = os.fork()
            if child == 0:
                try:
                    work()
                    os._exit(0)
                except BaseException as error:
                    print(error, file=sys.stderr)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
        call = Call(driver)
        in_child(call)  # before the first use
        call()
        def refused():
            assert "{KINDS[kind][1]} was in use before this process was forked" in error_of(RuntimeError, call)
        in_child(refused)
        call()
    """)


def test_threads(run):
    run("""
        from concurrent.futures import ThreadPoolExecutor
        call = Call(driver)
        def work(thread):
            for _ in range(500):
                call(blocks_per_request=2)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert driver.launches == 4000
        assert driver.count("cuModuleLoadData", "hipModuleLoadData") == 1
        assert driver.count("cuMemAlloc_v2", "hipMalloc") == 1
    """)
