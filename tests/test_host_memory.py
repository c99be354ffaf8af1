"""Registered and pinned host memory: pieces of whole pages, clean ends, and errors that leave nothing behind."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

import hisparse
from hisparse import HostRegistration, pin_host_pool, register_host_memory

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
without_gpu = pytest.mark.skipif(hisparse._C.gpu_target() is not None, reason="registers for real on a GPU")
PAGE, MIB = mmap.PAGESIZE, 1 << 20


def pages(size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8, size)


@pytest.mark.parametrize(
    ("size", "page_bytes", "chunk_bytes", "expected"),
    [
        (20 * MIB, 3 * MIB, 8 * MIB, [(0, 6 * MIB), (6 * MIB, 6 * MIB), (12 * MIB, 6 * MIB), (18 * MIB, 2 * MIB)]),
        (6 * MIB, 3 * MIB, 8 * MIB, [(0, 6 * MIB)]),
        (8 * MIB, 3 * MIB, 8 * MIB, [(0, 8 * MIB)]),
        (9 * MIB, 3 * MIB, 3 * MIB, [(0, 3 * MIB), (3 * MIB, 3 * MIB), (6 * MIB, 3 * MIB)]),
        (5 * PAGE, 1, 2 * PAGE + 1, [(0, 2 * PAGE), (2 * PAGE, 2 * PAGE), (4 * PAGE, PAGE)]),
        (6 * PAGE + 7, 3 * PAGE // 2, 5 * PAGE, [(0, 3 * PAGE), (3 * PAGE, 3 * PAGE), (6 * PAGE, 7)]),
        (10_000, 1, None, [(0, 10_000)]),
    ],
)
@without_gpu
def test_f23_pieces_are_whole_pages(size, page_bytes, chunk_bytes, expected):
    with register_host_memory(pages(size), page_bytes=page_bytes, chunk_bytes=chunk_bytes) as registration:
        assert registration.pieces == expected and registration.target is None
        assert sum(bytes for _, bytes in registration.pieces) == size


@pytest.mark.parametrize(
    ("error", "others", "named"),
    [
        (ValueError, {"chunk_bytes": PAGE - 1}, "chunk_bytes: expected room for whole pages of 1 bytes"),
        (ValueError, {"page_bytes": 3 * PAGE, "chunk_bytes": 2 * PAGE}, f"at least {3 * PAGE}, got {2 * PAGE}"),
        (ValueError, {"chunk_bytes": 0}, "chunk_bytes: expected at least 1, got 0"),
        (ValueError, {"page_bytes": -1}, "page_bytes: expected at least 1, got -1"),
        (TypeError, {"page_bytes": 2.0}, "page_bytes: expected an int, got float"),
        (TypeError, {"chunk_bytes": True}, "chunk_bytes: expected an int, got bool"),
        (TypeError, {"memory": b"bytes"}, "memory: expected a dense torch.Tensor or numpy.ndarray, got bytes"),
        (TypeError, {"memory": None}, "memory: expected a dense"),
        (ValueError, {"memory": pages(8 * PAGE)[::2]}, "memory: expected row-major storage"),
        (ValueError, {"memory": np.empty((0, 4))}, "memory: expected at least one byte"),
        (ValueError, {"memory": pages(8 * PAGE)[1:], "chunk_bytes": PAGE}, "memory: expected an address that 4096"),
    ],
)
def test_what_cannot_be_registered(error, others, named):
    memory = others.pop("memory", pages(8 * PAGE)) if "memory" in others else pages(8 * PAGE)
    with pytest.raises(error) as raised:
        register_host_memory(memory, **others)
    assert named in str(raised.value)


@without_gpu
def test_memory_is_registered_once():
    memory = pages(8 * PAGE)
    registration = register_host_memory(memory[PAGE : 4 * PAGE])
    for first, last in ((PAGE, 4 * PAGE), (0, 8 * PAGE), (0, PAGE + 1), (3 * PAGE, 5 * PAGE), (4 * PAGE - 1, 4 * PAGE)):
        with pytest.raises(ValueError, match="shares no page with what is registered"):
            register_host_memory(memory[first:last])
    beside = [register_host_memory(memory[:PAGE]), register_host_memory(memory[4 * PAGE :])]
    registration.unregister()
    assert not registration.is_registered and all(other.is_registered for other in beside)
    registration.unregister()  # a second time does nothing
    with register_host_memory(memory[PAGE : 4 * PAGE]) as again:
        assert again.is_registered
    assert not again.is_registered


@without_gpu
def test_an_error_leaves_nothing_registered():
    memory = pages(4 * PAGE)
    with pytest.raises(KeyError), register_host_memory(memory):
        raise KeyError
    with pytest.raises(ValueError):
        register_host_memory(memory, chunk_bytes=1)
    register_host_memory(memory).unregister()


@without_gpu
def test_the_end_of_the_object_unregisters():
    memory = pages(4 * PAGE)
    registration = register_host_memory(memory)
    assert registration.memory is memory
    del registration
    gc.collect()
    register_host_memory(memory).unregister()


@needs_torch
@without_gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5), None), ((7,), "bfloat16"), ((2, 3, 1000), "int64"), ((), "int8"), ((0, 4), "int32")]
)
def test_pin_host_pool(shape, dtype):
    dtype = torch.uint8 if dtype is None else getattr(torch, dtype)
    pool = pin_host_pool(shape, dtype)
    assert pool.shape == shape and pool.dtype == dtype and pool.is_contiguous() and pool.device.type == "cpu"
    assert not pool.view(-1).view(torch.uint8).any()
    if pool.numel():
        assert pool.data_ptr() % PAGE == 0
        pool.view(-1).view(torch.uint8).fill_(7)


@needs_torch
@without_gpu
def test_a_pool_is_registered_as_long_as_a_tensor_is_over_it():
    pool = pin_host_pool((64, 1024))
    view, address = pool[3:].view(torch.int32), pool.data_ptr()
    before = len(hisparse.host_memory._registered)
    with pytest.raises(ValueError, match="shares no page"):
        register_host_memory(view)
    del pool
    gc.collect()
    assert len(hisparse.host_memory._registered) == before and view.data_ptr() == address + 3 * 1024
    view.fill_(5)
    del view
    gc.collect()
    assert len(hisparse.host_memory._registered) == before - 1


@needs_torch
@pytest.mark.parametrize(
    ("error", "shape"),
    [(ValueError, (-1, 4)), (ValueError, (2**40, 2**40)), (MemoryError, (2**62,)), (ValueError, ("a",))],
)
def test_pools_that_cannot_be(error, shape):
    with pytest.raises(error):
        pin_host_pool(shape)


@needs_torch
@without_gpu
def test_a_pool_serves_an_op_and_outlives_a_fork():
    pool = pin_host_pool((4, 8))
    pool.copy_(torch.arange(32).reshape(4, 8))
    child = os.fork()
    if child == 0:
        del pool
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    out, index = torch.zeros(4, 8, dtype=torch.uint8), torch.arange(4)
    hisparse.copy_items(pool, out, index, index, 8)
    assert torch.equal(out, pool)


# With a driver


def test_registration_with_the_driver(run):
    run("""
        import mmap, gc
        PAGE = mmap.PAGESIZE
        memory = np.frombuffer(mmap.mmap(-1, 10 * PAGE), np.uint8)
        registered = driver.library.fake_registered
        with hisparse.register_host_memory(memory, page_bytes=PAGE * 2, chunk_bytes=PAGE * 5, device_index=1) as it:
            assert it.target == DEVICE and it.pieces == [(0, 4 * PAGE), (4 * PAGE, 4 * PAGE), (8 * PAGE, 2 * PAGE)]
            assert [registered(i) for i in range(4)] == [4 * PAGE, 4 * PAGE, 2 * PAGE, 0]
            assert driver.library.fake_current() == 0

            # An op reaches it across the pieces.
            call = Call(driver, mapped=False)
            call(host_cache=Tensor(memory, "cpu"))
            assert driver.library.fake_host_cache() == memory.ctypes.data + HOST_LOC_STEP
        order = [driver.library.fake_unregistered(i) - memory.ctypes.data for i in range(3)]
        assert order == [8 * PAGE, 4 * PAGE, 0] and registered(0) == 0
        assert "can reach" in error_of(ValueError, call, host_cache=Tensor(memory, "cpu"))

        driver.library.fake_capture(1)  # loading may happen while another thread captures
        handle = hisparse.register_host_memory(memory)
        driver.library.fake_capture(0)
        assert registered(0) == 10 * PAGE
        del handle
        gc.collect()
        assert registered(0) == 0
        message = error_of(ValueError, hisparse.register_host_memory, memory, device_index=2)
        assert "device_index: expected 0 to 1, got 2" in message and not hisparse.host_memory._registered
    """)


def test_f23_a_piece_that_the_driver_refuses(run):
    run("""
        import mmap
        PAGE = mmap.PAGESIZE
        memory = np.frombuffer(mmap.mmap(-1, 10 * PAGE), np.uint8)
        call = Call(driver)
        def refused(limit, error, named, **others):
            driver.library.fake_register_limit(ctypes.c_size_t(limit))
            unregistered = driver.count("cuMemHostUnregister", "hipHostUnregister")
            message = error_of(error, hisparse.register_host_memory, memory, **others)
            assert message.startswith(named), message
            assert KIND == "cuda" or driver.library.fake_last_error() == 0
            assert driver.library.fake_registered(0) == 0 and not hisparse.host_memory._registered
            call()  # no error sticks
            return message, driver.count("cuMemHostUnregister", "hipHostUnregister") - unregistered
        import ctypes
        at = memory.ctypes.data
        message, undone = refused(4 * PAGE, RuntimeError,
            f"memory: cannot register {10 * PAGE} bytes at {at:#x}, offset 0 of {10 * PAGE}: ")
        assert undone == 0 and message.endswith(" failed with error 2 (fake error 2)"), message
        # The last of three pieces meets another library's registration.
        function = driver.library[driver.name("cuMemHostRegister_v2", "hipHostRegister").decode()]
        undo = driver.library[driver.name("cuMemHostUnregister", "hipHostUnregister").decode()]
        last = ctypes.c_void_p(at + 9 * PAGE)
        driver.library.fake_register_limit(ctypes.c_size_t(-1))
        assert function(last, ctypes.c_size_t(10), 3) == 0
        message = error_of(ValueError, hisparse.register_host_memory, memory, chunk_bytes=4 * PAGE)
        assert f"{2 * PAGE} bytes at {at + 8 * PAGE:#x}, offset {8 * PAGE} of {10 * PAGE}" in message, message
        assert "error 712" in message and message.endswith("the 2 pieces before it are unregistered again"), message
        assert [driver.library.fake_unregistered(i) - at for i in range(2)] == [4 * PAGE, 0]
        assert driver.library.fake_registered(0) == 10 and driver.library.fake_registered(1) == 0
        assert undo(last) == 0

        # What is wrong with the driver at unregistration is said, once all pieces have been tried.
        driver.library.fake_register_limit(ctypes.c_size_t(4 * PAGE))
        it = hisparse.register_host_memory(memory, chunk_bytes=4 * PAGE)
        driver.fail("cuMemHostUnregister", "hipHostUnregister", 713)
        before = driver.count("cuMemHostUnregister", "hipHostUnregister")
        message = error_of(RuntimeError, it.unregister)
        assert f"memory: cannot unregister {2 * PAGE} bytes at {at + 8 * PAGE:#x}" in message, message
        assert driver.count("cuMemHostUnregister", "hipHostUnregister") == before + 3
        assert not it.is_registered and (KIND == "cuda" or driver.library.fake_last_error() == 0)
        it.unregister()
    """)


@pytest.mark.gpu
def test_a_registered_pool_on_a_gpu():
    pool = pin_host_pool((1000, 656), page_bytes=64 * 656, chunk_bytes=1 << 19)
    assert pool.is_pinned()
    pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
    out, index = torch.zeros(1000, 656, dtype=torch.uint8, device="cuda"), torch.randperm(1000, device="cuda")
    hisparse.copy_items(pool, out, index, index, 656)
    assert torch.equal(out.cpu(), pool)
    with pytest.raises(ValueError, match="shares no page"):
        register_host_memory(pool)


@pytest.mark.gpu
def test_memory_that_torch_has_pinned_is_registered_already():
    memory = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    with pytest.raises((ValueError, RuntimeError), match="cannot register"):
        register_host_memory(memory)
    torch.zeros(4, device="cuda").sum().item()  # no error sticks


@pytest.mark.gpu
def test_unregistered_memory_is_out_of_reach():
    memory = pages(16 * PAGE)
    out, index = torch.zeros(16, PAGE, dtype=torch.uint8, device="cuda"), torch.arange(16, device="cuda")
    source = torch.from_numpy(memory).view(16, PAGE)
    source.copy_(torch.arange(16)[:, None])
    with register_host_memory(memory, chunk_bytes=5 * PAGE) as registration:
        assert isinstance(registration, HostRegistration) and len(registration.pieces) == 4
        hisparse.copy_items(source, out, index, index, PAGE)
        assert torch.equal(out.cpu(), source)
    with pytest.raises(ValueError, match="can reach"):
        hisparse.copy_items(source, out, index, index, PAGE)
