"""The swap-in's relatives on a GPU's host side, against a fake driver: kernels, launch shapes, addresses, devices."""

from __future__ import annotations

import textwrap

import pytest

# A call of every kind, with host_cache in host memory that the driver has mapped.
SETUP = """
def without(arguments, *names):
    return {name: value for name, value in arguments.items() if name not in names}
def host_pools(arguments):
    return [name for name in arguments if name.startswith("host_cache") and name != "host_cache_locs"]
class Op:
    def __init__(self, function, arguments, index=0, mapped=True):
        self.function, self.arrays = function, arguments
        if mapped:
            for name in host_pools(arguments):
                driver.map(arguments[name])
        self.arguments = {
            name: Tensor(value, "cpu" if name in host_pools(arguments) else "cuda", index)
            if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    def __call__(self, **others):
        return self.function(**{**self.arguments, **others})
def dsv4(index=0, mapped=True, lead=0, **sizes):
    raw = [np.zeros(4 * 37440 + 16, np.uint8) for _ in range(2)]
    pools = [array[-array.ctypes.data % 16 + lead:][:4 * 37440] for array in raw]
    arguments = swap_in_arguments(item=584, **sizes) | {"host_cache": pools[0], "device_buffer": pools[1]}
    return Op(hisparse.load_cache_to_device_buffer_dsv4_mla, arguments, index, mapped)
def blocks(index=0, mapped=True, item=16, batch=2, top_k=4, hot=8, sparse_block_size=2, **sizes):
    arguments = swap_in_arguments(item=item, batch=batch, top_k=top_k, hot=hot, **sizes)
    pools = {f"{name}_{x}": np.zeros((64, item), np.uint8) for name in ("host_cache", "device_buffer") for x in "kv"}
    arguments = without(arguments, "top_k_tokens", "num_top_k", "host_cache", "device_buffer") | pools
    arguments |= {"top_k_blocks": np.zeros((batch, top_k // sparse_block_size), np.int32),
                  "sparse_block_size": sparse_block_size}
    return Op(hisparse.load_blocks_to_device_buffer_mha, arguments, index, mapped)
def planned(index=0, mapped=True, batch=3, width=4, item=16, dsv4=False):
    shape = (2, 37440) if dsv4 else (64, item)
    return Op(hisparse.copy_cache_planned_mla, {
        "miss_src": np.zeros((batch, width), np.int64), "miss_dst": np.zeros((batch, width), np.int32),
        "miss_count": np.zeros(batch, np.int32), "num_real_reqs": np.zeros(1, np.int32),
        "host_cache": np.zeros(shape, np.uint8), "device_buffer": np.zeros(shape, np.uint8),
        "item_size_bytes": 584 if dsv4 else item, "is_dsv4_layout": dsv4}, index, mapped)
def transfer(index=0, layers=3, count=100):
    return Op(hisparse.transfer_cache_dsv4_mla, {
        "src_ptrs": np.zeros(layers, np.uint64), "dst_ptrs": np.zeros(layers, np.uint64),
        "src_indices": np.zeros(count, np.int64), "dst_indices": np.zeros(count, np.int64)}, index)
def translate(index=0, count=1000):
    arguments = {"mapping": np.zeros(50, np.int32), "locations": np.zeros(count, np.int64)}
    return Op(hisparse.translate_padded_hisparse_locations, arguments, index)
Tensor.new_empty = lambda self, shape, dtype: Tensor(
    np.empty(shape, dtype.removeprefix("torch.")), self.device.type, self.device.index)
"""


@pytest.fixture
def run_ops(run):
    def run_ops(script: str, *defines: str) -> None:
        run(SETUP + textwrap.dedent(script), *defines)

    return run_ops


def test_the_kernels(run_ops):
    run_ops("""
        for make, name in ((dsv4, "hisparse_dsv4_swap_in"), (blocks, "hisparse_block_swap_in")):
            for hot, size in ((8, "4"), (6000, "8"), (12000, "any")):
                make(hot=hot)()
                assert driver.kernel == f"{name}_{size}", driver.kernel
        Call(driver)()
        assert driver.kernel == "hisparse_swap_in_4"
        for op, name in ((planned(), "copy_planned"), (planned(dsv4=True), "copy_planned_dsv4"),
                         (transfer(), "copy_layers_dsv4"), (translate(), "translate")):
            op()
            assert driver.kernel == "hisparse_" + name, driver.kernel
    """)


def test_swap_in_launches(run_ops):
    run_ops("""
        Stream.handles[1] = 77
        for op in (dsv4(index=1, batch=4, hot=1000, top_k=40), blocks(index=1, batch=4, hot=1000, top_k=40)):
            op(block_size=64)
            launch = driver.launch
            assert (launch.blocks, launch.parts, launch.threads, launch.device, launch.stream) == (4, 1, 256, 1, 77)
            assert 4000 < launch.shared_bytes <= 65536
            op(blocks_per_request=5)
            assert driver.launch.parts == 5
        # One request is shared by as many blocks as have words to copy: keys and values count.
        for top_k, parts in ((8, 1), (32, 4), (40, 5)):
            blocks(index=1, batch=1, hot=1000, top_k=top_k, item=256)()
            assert driver.launch.parts == parts, (top_k, driver.launch.parts)
    """)


def test_the_width_of_words(run_ops):
    run_ops("""
        for lead, width in ((0, 16), (8, 8)):
            dsv4(lead=lead)()
            assert driver.library.fake_word_bytes() == width
        def pool(lead, item=48):
            raw = np.zeros(64 * item + 16, np.uint8)
            return Tensor(raw[-raw.ctypes.data % 16 + lead:][:64 * item].reshape(64, item))
        names = ["host_cache_k", "host_cache_v", "device_buffer_k", "device_buffer_v"]
        for odd in names:
            for lead, width in ((0, 16), (8, 8), (4, 4), (1, 1)):
                blocks(item=48)(**{name: pool(lead if name == odd else 0) for name in names})
                assert driver.library.fake_word_bytes() == width, (odd, lead)
    """)


def test_planned_launches(run_ops):
    run_ops("""
        Stream.handles[1] = 5
        op = planned(index=1, batch=100)
        op()
        launch = driver.launch
        assert (launch.blocks, launch.parts, launch.threads, launch.device, launch.stream) == (4, 1, 512, 1, 5)
        assert launch.shared_bytes == 512 * 20 + 128 and driver.library.fake_rows_per_group() == 1
        op(num_blocks=16, block_size=64)
        assert (driver.launch.blocks, driver.launch.threads) == (16, 64)
        assert driver.library.fake_rows_per_group() == 2 and driver.launch.shared_bytes == 64 * 20 + 128
        launches = driver.launches
        empty = {name: Tensor(op.arrays[name][:0], index=1) for name in ("miss_src", "miss_dst", "miss_count")}
        op(**empty)
        assert driver.launches == launches
        assert "block_size" in error_of(ValueError, op, **empty, block_size=65)
        op(skip_io=True)
        assert driver.launches == launches + 1
    """)


def test_transfer_launches(run_ops):
    run_ops("""
        transfer(layers=3, count=100)()
        # Ten multiprocessors take 20 blocks of 1024 threads: 4 have the 100 tokens, for each of the layers.
        assert (driver.launch.blocks, driver.launch.parts, driver.launch.threads) == (4, 3, 1024)
        assert driver.library.fake_layer_step() == 3
        transfer(layers=61, count=1)()
        assert (driver.launch.blocks, driver.launch.parts) == (1, 20) and driver.library.fake_layer_step() == 20
        transfer(layers=1, count=100_000)(block_size=256)
        assert (driver.launch.blocks, driver.launch.parts) == (80, 1)
        launches = driver.launches
        transfer(count=0)(), transfer(layers=0)()
        assert driver.launches == launches
        assert "block_size" in error_of(ValueError, transfer(count=0), block_size=65)
    """)


def test_translation(run_ops):
    run_ops("""
        Stream.handles[1] = 9
        for count, grid in ((1, 1), (256, 1), (257, 2), (10**6, 80)):
            output = translate(index=1, count=count)()
            launch = driver.launch
            assert (launch.blocks, launch.threads, launch.device, launch.stream) == (grid, 256, 1, 9)
            assert output.shape == (count,) and output.dtype == "torch.int64" and output.device.index == 1
        launches = driver.launches
        assert translate(count=0)().shape == (0,) and driver.launches == launches
    """)


def test_host_memory_has_another_address_on_the_device(run_ops):
    run_ops("""
        def on_device(array):
            return array.ctypes.data + HOST_LOC_STEP
        op = dsv4()
        op()
        assert driver.library.fake_host_cache() == on_device(op.arrays["host_cache"])
        op = blocks()
        op()
        assert driver.library.fake_host_cache() == on_device(op.arrays["host_cache_k"])
        assert driver.library.fake_host_values() == on_device(op.arrays["host_cache_v"])
        op = planned()
        op()
        assert driver.library.fake_planned_host_cache() == on_device(op.arrays["host_cache"])
    """)


def test_host_memory_that_is_not_mapped(run_ops):
    run_ops("""
        for make in (dsv4, blocks, planned):
            op = make(mapped=False)
            for name in host_pools(op.arrays):
                for mapped in host_pools(op.arrays):
                    if mapped != name:
                        driver.map(op.arrays[mapped])
                message = error_of(ValueError, op)
                assert message.startswith(f"{name}: expected host memory that {DEVICE}:0 can reach"), message
                driver.library.fake_unmap_all()
        assert driver.launches == 0
    """)


def test_every_tensor_is_on_one_device(run_ops):
    run_ops("""
        where = {dsv4: "device_buffer", blocks: "device_buffer_k", planned: "device_buffer", transfer: "src_ptrs",
                 translate: "locations"}
        for make, anchor in where.items():
            op = make()
            for name, value in op.arrays.items():
                if not isinstance(value, np.ndarray) or name == anchor:
                    continue
                for there, tensor in (("cpu", value), (DEVICE + ":1", Tensor(value, "cuda", 1))):
                    if there == "cpu" and name in host_pools(op.arrays):
                        continue
                    message = error_of(ValueError, op, **{name: tensor})
                    wanted = f"{name}: expected a tensor on {DEVICE}:0, where {anchor} is, got one on {there}"
                    assert message == wanted, (message, wanted)
            op()
        assert driver.launches == len(where)
    """)


def test_arrival_counters_are_shared_with_the_plain_op(run_ops):
    run_ops("""
        Call(driver)(blocks_per_request=2)
        counters = driver.arrivals
        for op in (dsv4(), blocks()):
            op(blocks_per_request=3)
            assert driver.arrivals == counters != 0 and driver.launch.parts == 3
    """)


def test_shared_memory(run_ops):
    run_ops("""
        driver.library.fake_setup(2, 30000)
        for op, name in ((dsv4(top_k=64, hot=12000), "num_top_k"), (blocks(top_k=64, hot=12000), "sparse_block_size")):
            message = error_of(ValueError, op)
            assert message.startswith(f"{name}, hot_buffer_size: expected a plan that fits in a block's 30000 bytes")
        assert driver.launches == 0
    """)


def test_shared_memory_of_a_planned_copy(run_ops):
    run_ops("""
        driver.library.fake_setup(2, 10000)
        message = error_of(ValueError, planned())
        assert message.startswith("block_size: expected ") and "10000" in message, message
        assert message.endswith("got 1024, of which 512 need 10368 bytes"), message
        planned()(block_size=256)
        assert driver.launches == 1
    """)
