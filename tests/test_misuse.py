"""Misuse that once went wrong: found by trying to break the ops, kept so that it stays mended."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import hisparse
from hisparse import kvcacheio

INDICES = np.arange(8)
WIDE, EMPTY = np.ones((64, 4096), np.uint8), np.empty((64, 0), np.uint8)
PAGES = np.ones((8, 2, 4, 4096), np.uint8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kvcacheio.transfer_kv_direct([WIDE], [EMPTY], INDICES, INDICES, 1),
        lambda: kvcacheio.transfer_kv_direct([EMPTY], [WIDE], INDICES, INDICES, 1),
        lambda: kvcacheio.transfer_kv_direct([WIDE, WIDE], [WIDE.copy(), EMPTY], INDICES, INDICES, 1),
        lambda: kvcacheio.transfer_kv_per_layer_direct_pf_lf([PAGES], [EMPTY, EMPTY], INDICES, INDICES, 0, 4),
        lambda: kvcacheio.transfer_kv_all_layer_direct_lf_pf([EMPTY, EMPTY], [PAGES], INDICES, INDICES, 4),
    ],
)
def test_tokens_of_no_bytes_are_not_those_of_the_other_side(call):
    with pytest.raises(ValueError, match="4096.*0 bytes|0 bytes.*4096"):
        call()


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", object), ("b", np.int8)])])
@pytest.mark.parametrize("name", ["src", "dst"])
def test_objects_are_no_bytes(dtype, name):
    pools = {"src": np.zeros((4, 8), np.uint8), "dst": np.zeros((4, 8), np.uint8)} | {name: np.empty((4, 1), dtype)}
    with pytest.raises(TypeError, match=f"{name}.*objects"):
        hisparse.copy_items(pools["src"], pools["dst"], np.arange(4), np.arange(4), 8)


@pytest.mark.parametrize("layer", [2, -1, 1 << 31, -(1 << 40), 1 << 70, -(1 << 70)])
def test_any_layer_outside_is_an_index_error(layer):
    with pytest.raises(IndexError, match="layer_id"):
        kvcacheio.transfer_kv_per_layer_direct_pf_lf([PAGES], [WIDE.copy()], INDICES, INDICES, layer, 4)


def test_no_layer_changes_where_one_has_no_room():
    rows = np.arange(64, dtype=np.uint8).reshape(8, 8)
    before = rows.copy()
    pools = np.array([rows.ctypes.data, rows.ctypes.data], np.uint64)
    with pytest.raises(MemoryError):
        kvcacheio.copy_all_layer_kv_cache_cpu(
            pools, np.array([8, 1 << 61], np.int64), np.array([1, 2], np.int64), np.array([0, 1], np.int64)
        )
    assert (rows == before).all()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WARP_SIZE", str(2**32 + 32)),
        ("WARP_SIZE", " 32"),
        ("SEED", str(2**64)),
        ("SEED", "-1"),
        ("STRICT", "2"),
        ("SHARED_MEMORY_BYTES", "many"),
    ],
)
def test_silly_environment(monkeypatch, variable, value):
    monkeypatch.setenv(f"HISPARSE_CPU_{variable}", value)
    with pytest.raises(ValueError, match=f"HISPARSE_CPU_{variable}"):
        hisparse.cpu.get_options()


def test_a_single_row_may_have_any_stride():
    locs = np.arange(9, dtype=np.int32)[None]
    assert locs.strides[0] == 0 or locs.flags.c_contiguous
    tokens, lru = np.full((1, 9), -1, np.int32), np.arange(8, dtype=np.int16)[None]
    out = np.zeros((1, 4), np.int32)
    host, device = np.arange(800, dtype=np.uint8).reshape(100, 8), np.zeros((9, 8), np.uint8)
    top_k = np.array([[7, 42, 3, 98]], np.int32)
    hisparse.load_cache_to_device_buffer_mla(
        top_k,
        tokens,
        np.arange(100)[None],
        locs,
        host,
        device,
        out,
        np.array([0]),
        np.array([100]),
        lru.copy(),
        8,
        4,
        8,
    )
    assert (device[out[0]] == host[top_k[0]]).all()


def test_a_call_keeps_the_options_that_it_started_with():
    src = np.arange(256 * 16, dtype=np.uint32).view(np.uint8).reshape(-1, 16)[:256]
    indices, stop = np.arange(256), threading.Event()

    def toggle():
        while not stop.is_set():
            for warp_size in (32, 64):
                with hisparse.cpu.options(warp_size=warp_size):
                    pass

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        for _ in range(2000):
            dst = np.zeros_like(src)
            kvcacheio.transfer_kv_per_layer_mla(src, dst, indices, indices, 16, 1, 2)
            assert (dst == src).all()
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_beside_a_call_leaves_no_lock_behind():
    script = """
        import os, threading
        import numpy as np
        import hisparse
        src, dst, index = np.ones((4, 8), np.uint8), np.zeros((4, 8), np.uint8), np.arange(4)
        def call():
            while True:
                hisparse.cpu.get_options()
        for _ in range(3):
            threading.Thread(target=call, daemon=True).start()
        for _ in range(200):
            child = os.fork()
            if child == 0:
                hisparse.copy_items(src, dst, index, index, 8)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        print("done", flush=True)
        os._exit(0)
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100
    )
    assert result.stdout == "done\n", result.stderr
