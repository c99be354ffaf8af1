"""hisparse.kvcacheio on a GPU's host side, against a fake driver: launch shapes, addresses, copies and their errors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

# A call of every kind, with pools in host memory that the driver has mapped.
SETUP = """
from hisparse import kvcacheio
rng = np.random.default_rng(0)
def host(*shape, mapped=True):
    array = rng.integers(0, 256, shape, np.uint8)
    if mapped:
        driver.map(array)
    return array
def on_host(array):
    return Tensor(array, "cpu")
def mla(count=1000, src=None, dst=None, index=0, **others):
    src = on_host(host(64, 512)) if src is None else src
    dst = Tensor(np.zeros((64, 512), np.uint8), index=index) if dst is None else dst
    indices = {"src_indices": Tensor(np.zeros(count, np.int64), index=index),
               "dst_indices": Tensor(np.zeros(count, np.int64), index=index)}
    kvcacheio.transfer_kv_per_layer_mla(src, dst, **{**indices, "item_size": 512, **others})
class Direct:
    def __init__(self, pages=3, page_size=2, layers=2):
        tokens = pages * page_size
        self.src = [host(tokens, 24) for _ in range(layers)]
        self.dst = [np.zeros((tokens, 24), np.uint8) for _ in range(layers)]
        order = rng.permutation(pages)
        self.indices = (order[:, None] * page_size + np.arange(page_size)).reshape(-1)
        self.page_size = page_size
    def __call__(self, on_device=False, **others):
        indices = Tensor(self.indices) if on_device else self.indices
        kvcacheio.transfer_kv_direct(**{
            "src_layers": [on_host(a) for a in self.src], "dst_layers": [Tensor(a) for a in self.dst],
            "src_indices": indices, "dst_indices": indices, "page_size": self.page_size, **others})
    def is_done(self):
        return all(np.array_equal(a, b) for a, b in zip(self.src, self.dst))
"""


@pytest.fixture
def run_ops(run):
    def run_ops(script: str, *defines: str) -> None:
        run(SETUP + textwrap.dedent(script), *defines)

    return run_ops


def test_F41_launch_shapes(run_ops):
    run_ops("""
        warps, by_default = (32, 2) if KIND == "cuda" else (16, 16)
        mla()
        assert (driver.launch.blocks, driver.launch.threads) == (by_default, warps * 32)
        assert driver.launch.shared_bytes == 16 * warps * 32
        os.environ["SGLANG_HICACHE_BLOCK_QUOTA"] = "5"
        mla()
        assert driver.launch.blocks == 5
        mla(block_quota=3, num_warps_per_block=7)
        assert (driver.launch.blocks, driver.launch.threads, driver.launch.parts) == (3, 224, 1)
        mla(count=1)
        assert driver.launch.blocks == 1
        mla(count=40, block_quota=64)
        assert driver.launch.blocks == 40
        src, dst = (Tensor(np.zeros((64, 512), np.uint8)) for _ in range(2))
        indices = Tensor(np.zeros(1000, np.int64))
        kvcacheio.transfer_kv_per_layer(src, dst, src, dst, indices, indices, 512)
        assert driver.launch.blocks == 2
        mla(block_quota=10**12, count=10**6)
        assert 10**4 < driver.launch.blocks < 2**22
        assert "at most 32 warps of 32" in error_of(ValueError, mla, num_warps_per_block=33)
        launches = driver.launches
        mla(count=0)
        assert driver.launches == launches
        assert "num_warps_per_block" in error_of(ValueError, mla, count=0, num_warps_per_block=33)
    """)


SHAPES = """
        def shape(item_size, quota, to_host=False, count=256, **others):
            places = (lambda a: Tensor(a)), on_host
            src, dst = (places[side](host(64, item_size)) for side in (not to_host, to_host))
            mla(count, src, dst, item_size=item_size, block_quota=quota, **others)
            return driver.launch.blocks, driver.launch.threads // 32, driver.library.fake_parts_per_tile()
"""


def test_few_large_items_to_the_host(run_ops):
    """Blocks, warps and parts of a tile: single parts where 64 KiB of them are in flight."""
    run_ops(f"""{SHAPES}
        nvidia = KIND == "cuda"
        def to_host(*sizes, **others):
            return shape(*sizes, to_host=True, **others)
        assert to_host(4096, 2) == (2, 16, 1 if nvidia else 3)
        assert to_host(4096, 1) == ((1, 32, 1) if nvidia else (1, 16, 3))
        assert to_host(1152, 4) == (4, 16, 1 if nvidia else 4)
        assert to_host(1152, 2) == (2, 16, 8)
        assert to_host(512, 8) == (8, 16, 1 if nvidia else 2)
        assert to_host(496, 8) == (8, 16, 2)
        assert to_host(512, 7) == (7, 13, 3)
        assert to_host(4096, 2, num_warps_per_block=12) == (2, 12, 3)
        assert to_host(4096, 3, num_warps_per_block=12) == (3, 12, 1 if nvidia else 3)
    """)


def test_few_large_items_from_the_host(run_ops):
    """Single parts where 128 KiB of them are in flight: in as few warps of a block as do."""
    run_ops(f"""{SHAPES}
        nvidia = KIND == "cuda"
        assert shape(4096, 2) == ((2, 32, 1) if nvidia else (2, 16, 3))
        assert shape(4096, 4) == (4, 16, 1 if nvidia else 2)
        assert shape(4096, 1) == (1, 32 if nvidia else 16, 3)
        assert shape(1152, 4) == ((4, 32, 1) if nvidia else (4, 16, 4))
        assert shape(1152, 8) == (8, 16, 1 if nvidia else 2)
        assert shape(1152, 2) == ((2, 32, 4) if nvidia else (2, 16, 8))
    """)


def test_large_tiles_stay(run_ops):
    """Where single parts take too long, are too many for a warp, or no host memory is in play."""
    run_ops(f"""{SHAPES}
        warps = 32 if KIND == "cuda" else 16
        assert shape(4096, 2, count=8 * 2 * 32) == ((2, 32, 1) if KIND == "cuda" else (2, 16, 3))
        assert shape(4096, 2, count=8 * 2 * 32 + 1) == (2, warps, 3)
        assert shape(4096, 4, True, count=8 * 4 * 32 + 1) == (4, warps, 3)
        assert shape(4104, 4, True) == (4, 16, 2)
        src, dst = (Tensor(np.zeros((64, 4096), np.uint8)) for _ in range(2))
        mla(256, src, dst, item_size=4096, block_quota=4)
        assert driver.library.fake_parts_per_tile() > 1
    """)


def test_streams_and_devices(run_ops):
    run_ops("""
        Stream.handles.update({0: 55, 1: 77})
        for index in (1, 0):
            mla(index=index)
            assert (driver.launch.device, driver.launch.stream) == (index, 77 if index else 55)
            assert driver.library.fake_current() == 0
        dst = Tensor(np.zeros((64, 512), np.uint8), index=1)
        assert "src_indices" in error_of(ValueError, mla, dst=dst)
        assert "src: expected a tensor on" in error_of(ValueError, mla, src=dst)
    """)


def test_F21_host_memory_has_another_address_on_the_device(run_ops):
    run_ops("""
        k, v = host(8, 96), host(8, 96)
        dst = [Tensor(np.zeros((8, 32), np.uint8)) for _ in range(2)]
        indices = Tensor(np.arange(3))
        kvcacheio.transfer_kv_per_layer_pf_lf(on_host(k), dst[0], on_host(v), dst[1], indices, indices, 2, 32, 96)
        for side, array in enumerate((k, v)):
            assert driver.library.fake_transfer_src(side) == array.ctypes.data + HOST_LOC_STEP + 2 * 32
            assert driver.library.fake_transfer_dst(side) == dst[side].data_ptr()
        dst = host(64, 512)
        mla(src=Tensor(np.zeros((64, 512), np.uint8)), dst=on_host(dst))
        assert driver.library.fake_transfer_dst(0) == dst.ctypes.data + HOST_LOC_STEP
        launches = driver.launches
        unmapped = on_host(host(64, 512, mapped=False))
        assert error_of(ValueError, mla, src=unmapped).startswith("src: expected host memory that")
        assert error_of(ValueError, mla, src=unmapped, count=0).startswith("src: expected host memory that")
        part = host(64, 512, mapped=False)
        driver.map(part, 0, 1000)
        assert error_of(ValueError, mla, dst=on_host(part)).startswith("dst: expected host memory that")
        assert driver.launches == launches
    """)


def test_F28_indices_and_tables_are_on_the_gpu(run_ops):
    run_ops("""
        cpu, gpu = np.arange(4), Tensor(np.arange(4))
        table = np.zeros(3, np.uint64)
        pool = on_host(host(8, 96))
        def call(src=Tensor(table), src_indices=gpu, dst_indices=gpu):
            kvcacheio.transfer_kv_all_layer_mla_lf_pf(src, pool, src_indices, dst_indices, 32, 96, 3)
        for there in (cpu, on_host(cpu)):
            for name in ("src_indices", "dst_indices"):
                message = error_of(ValueError, call, **{name: there})
                assert message == f"{name}: expected a tensor on {DEVICE}:0, where src_layers is, got one on cpu"
        message = error_of(ValueError, call, src=on_host(table))
        assert message == f"src_layers: expected a tensor on {DEVICE}:0, where dst_indices is, got one on cpu"
        call()
        assert driver.launches == 1
    """)


def test_copies_in_batches(run_ops):
    run_ops("""
        Stream.handles[0] = 55
        direct = Direct()
        direct()
        assert direct.is_done() and driver.batches == 1 and driver.single_copies == 0
        for pages in (8192, 8193, 20_000):  # F40
            direct, batches, copied = Direct(pages, 1, 1), driver.batches, driver.library.fake_copied()
            direct()
            assert direct.is_done() and driver.library.fake_largest_batch() <= 8192
            runs = 1 + np.count_nonzero(np.diff(direct.indices) != 1)
            assert driver.library.fake_copied() - copied == runs
            assert -(-runs // 8192) == driver.batches - batches + (runs % 8192 == 1)
        assert KIND == "hip" or driver.library.fake_count(b"cuMemcpyBatchAsync") == 0
    """)


@pytest.mark.parametrize("define", ["FAKE_WITHOUT_BATCHES", "FAKE_CUDA_12"])
def test_older_drivers(run_ops, kind, define):
    if kind == "hip" and define == "FAKE_CUDA_12":
        pytest.skip("a driver of CUDA")
    run_ops(
        f"""
        Stream.handles[0] = 55
        direct = Direct(50, 1, 2)
        direct()
        assert direct.is_done()
        without = {define!r} == "FAKE_WITHOUT_BATCHES"
        assert (driver.single_copies > 50, driver.batches) == ((True, 0) if without else (False, 1))
        """,
        define,
    )


@pytest.mark.parametrize("stream", [0, 1])
def test_the_legacy_default_stream_takes_single_copies(run_ops, stream):
    run_ops(f"""
        Stream.handles[0] = {stream}
        direct = Direct()
        direct()
        assert direct.is_done() and driver.batches == 0 and driver.single_copies > 1
    """)


def test_a_batch_that_fails_is_copied_one_by_one(run_ops):
    run_ops("""
        Stream.handles[0] = 55
        for code in (1, 801):
            direct = Direct(9000, 1, 1)
            for name in (b"cuMemcpyBatchAsync_v2", b"hipMemcpyBatchAsync"):
                driver.library.fake_fail(name, code)
            singles = driver.single_copies
            direct()
            assert direct.is_done() and driver.single_copies - singles > 8000
            assert KIND == "cuda" or driver.library.fake_last_error() == 0
        driver.fail("cuMemcpyAsync", "hipMemcpyAsync", 719)
        message = error_of(RuntimeError, direct)
        assert message.endswith("emcpyAsync failed with error 719 (fake error 719)"), message
        assert driver.library.fake_current() == 0 and (KIND == "cuda" or driver.library.fake_last_error() == 0)
    """)


def test_indices_on_the_device(run_ops):
    run_ops("""
        Stream.handles[0] = 55
        direct = Direct()
        before = driver.count("cuStreamSynchronize", "hipStreamSynchronize")
        direct(on_device=True)
        assert direct.is_done()
        assert driver.single_copies == 2  # of the indices
        assert driver.count("cuStreamSynchronize", "hipStreamSynchronize") > before + 1
        direct = Direct()
        direct.indices[3] = -1
        copied = driver.library.fake_copied()
        assert "got -1 at position 3" in error_of(ValueError, direct, on_device=True)
        assert driver.library.fake_copied() - copied == 2 and not any(a.any() for a in direct.dst)
        other = Tensor(direct.indices, index=1)
        assert "src_indices: expected a tensor on" in error_of(ValueError, direct, src_indices=other)
    """)


def test_graphs(run_ops):
    run_ops("""
        Stream.handles[0] = 55
        Direct()()
        driver.library.fake_capture(1)
        mla()
        direct = Direct()
        copied = driver.library.fake_copied()
        message = error_of(RuntimeError, direct, on_device=True)
        assert message.startswith("src_indices: indices on the device are read on the host"), message
        assert driver.library.fake_copied() == copied
        direct()
        assert direct.is_done() and driver.batches == 1  # graphs take single copies
        empty = Tensor(np.zeros(0, np.int64))
        direct(src_indices=empty, dst_indices=empty)
    """)


def test_memory_of_direct_copies(run_ops):
    run_ops("""
        direct = Direct()
        direct.src[1] = host(6, 24, mapped=False)
        message = error_of(ValueError, direct)
        assert message.startswith("src_layers[1]: expected host memory that"), message
        assert driver.library.fake_copied() == 0
        direct.src[1] = host(6, 24)
        on_gpu = [Tensor(a) for a in direct.src]
        direct(src_layers=on_gpu)
        assert direct.is_done()
        direct(src_layers=on_gpu, dst_layers=[on_host(host(6, 24)) for _ in direct.dst])
        message = error_of(ValueError, direct, src_layers=[Tensor(a, index=1) for a in direct.src])
        assert message.startswith(f"src_layers[0]: expected a tensor on {DEVICE}:0, where dst_layers[0] is, got one on")
    """)


def test_embedding_ranges(run_ops):
    run_ops("""
        table, buffer = host(20, 8), np.zeros((10, 8), np.uint8)
        ranges = ([3, 15], [0, 4], [4, 5])
        kvcacheio.transfer_embedding_ranges_direct(on_host(table), Tensor(buffer), *ranges)
        assert np.array_equal(buffer[:4], table[3:7]) and np.array_equal(buffer[4:9], table[15:20])
        copied = driver.library.fake_copied()
        message = error_of(
            ValueError, kvcacheio.transfer_embedding_ranges_direct, Tensor(table), Tensor(buffer), *ranges)
        assert message.startswith("dst: expected a tensor on the CPU, since src is on"), message
        unmapped = on_host(host(20, 8, mapped=False))
        assert error_of(
            ValueError, kvcacheio.transfer_embedding_ranges_direct, unmapped, Tensor(buffer), *ranges
        ).startswith("src: expected host memory")
        assert driver.library.fake_copied() == copied
    """)


def test_the_address_of_a_tensor(run_ops):
    run_ops("""
        pool = host(64, 512)
        address = kvcacheio.get_device_accessible_ptr
        assert address(pool[3:], 0) == pool[3:].ctypes.data + HOST_LOC_STEP
        assert address(on_host(pool), 1) == pool.ctypes.data + HOST_LOC_STEP
        device = Tensor(np.zeros(5))
        assert address(device, 0) == device.data_ptr()
        assert "a tensor on" in error_of(ValueError, address, device, 1)
        assert error_of(ValueError, address, pool, 2) == "device_index: expected 0 to 1, got 2"
        message = error_of(ValueError, address, host(64, 512, mapped=False), 0)
        assert message.startswith(f"tensor: expected host memory that {DEVICE}:0 can reach"), message
    """)


def test_the_address_of_a_tensor_without_a_device(run_ops):
    run_ops("""
        driver.library.fake_setup(0, 65536)
        pool = host(4, 4)
        assert kvcacheio.get_device_accessible_ptr(pool, 0) == pool.ctypes.data
        assert kvcacheio.get_device_accessible_ptr(pool, 7) == pool.ctypes.data
    """)


def test_the_address_of_a_tensor_after_a_fork(run_ops, kind):
    run_ops("""
        import warnings
        warnings.simplefilter("ignore")
        pool = host(4, 4)
        kvcacheio.get_device_accessible_ptr(pool, 0)
        child = os.fork()
        if child == 0:
            message = error_of(RuntimeError, kvcacheio.get_device_accessible_ptr, pool, 0)
            os._exit(0 if "before this process was forked" in message else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_no_driver_library_at_all():
    source = """
import numpy as np
from hisparse import kvcacheio
pool = np.zeros(8)
assert kvcacheio.get_device_accessible_ptr(pool, 0) == pool.ctypes.data
"""
    nowhere = dict.fromkeys(("HISPARSE_CUDA_LIBRARY", "HISPARSE_HIP_LIBRARY"), "/nowhere/libdriver.so")
    subprocess.run([sys.executable, "-c", source], check=True, env={**os.environ, **nowhere}, timeout=120)
