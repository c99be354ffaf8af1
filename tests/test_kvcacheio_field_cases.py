"""Inputs that broke transfer ops in real use, with their right outcome, at each place; what needs a GPU is in
test_kvcacheio_gpu.py, and what shows on a driver's side alone in test_kvcacheio_drivers.py."""

from __future__ import annotations

import mmap
import subprocess
import sys
import warnings

import numpy as np
import pytest
from kvcacheio_cases import HEAD_OPS, OPS, Placed, Shape, check, make_case
from places import between_unreadable_pages, torch

import hisparse
import hisparse.kvcacheio as kvcacheio

MAP_NORESERVE = 0x4000  # of mmap on Linux: address space alone, so that large pools cost what is touched of them


def sparse_pool(size: int) -> np.ndarray:
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, MemoryError):
        pytest.skip(f"no address space for {size} bytes")
    return np.frombuffer(memory, np.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="needs MAP_NORESERVE")
@pytest.mark.parametrize("op", OPS)
def test_F15_pools_above_4_gib(cpu_place, rng, op):
    """Tokens on both sides of 2 GiB, 4 GiB and 2**32 items' worth of bytes, in pools that are mostly address space."""
    item, layers, page, heads = 656, 3, 4, 4
    row, tokens = item * layers, 3_300_000
    ends = [int(edge) // row // page * page + step for edge in (0, 2**31, 2**32, 6 * 2**30) for step in (0, 1, page)]
    src_indices, dst_indices = rng.permutation(ends), rng.permutation(ends)
    sizes = {"item_size": item}
    if "layer_id" in (names := kvcacheio.__dict__[op].__code__.co_varnames):
        sizes |= {"layer_id": 2, "src_layout_dim": row}
    sizes |= {"dst_layout_dim": row} if "dst_layout_dim" in names else {}
    sizes |= {"num_layers": layers} if "num_layers" in names else {}
    sizes |= {"page_size": page, "head_num": heads} if op in HEAD_OPS else {}

    def parts_of(layout: str, pool: np.ndarray, token: int) -> list[np.ndarray]:
        """Every piece of a token that the op moves, in the order of layers and heads."""
        if layout == "ph":
            paged = pool[: tokens // page * page * row].reshape(-1, heads, page, layers, item // heads)
            moved = range(layers) if "num_layers" in sizes else [2]
            return [paged[token // page, h, token % page, layer] for layer in moved for h in range(heads)]
        if layout == "pf":
            moved = range(layers) if "num_layers" in sizes else [2]
            return [pool[token * row + layer * item :][:item] for layer in moved]
        return [pool[token * item :][:item]]

    pools = {}
    for end, layout in zip(("src", "dst"), OPS[op], strict=True):
        count = layers if layout == "table" else 1
        pools[end] = [sparse_pool(tokens * (row if layout in ("pf", "ph") else item * layers)) for _ in range(count)]
    pieces = {}
    for i in src_indices.tolist():
        pieces[i] = []
        for pool in pools["src"]:
            for part in parts_of(OPS[op][0], pool, i):
                part[:] = rng.integers(1, 256, len(part))
                pieces[i].append(part)

    arguments = []
    for side in range(1 if "_mla" in op else 2):
        del side  # keys and values may be one pool
        for end, layout in zip(("src", "dst"), OPS[op], strict=True):
            table = np.array([pool.ctypes.data for pool in pools[end]], np.uint64)
            arguments.append(table if layout == "table" else pools[end][0])
    with cpu_place.options():
        getattr(kvcacheio, op)(*arguments, src_indices, dst_indices, **sizes)
    for i, j in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
        moved = np.concatenate(pieces[i])
        arrived = [part for pool in pools["dst"] for part in parts_of(OPS[op][1], pool, j)]
        assert np.array_equal(np.concatenate(arrived), moved), (i, j)


@pytest.mark.parametrize(("item_size", "leads"), [(24, (0, 0)), (584, (0, 0)), (512, (8, 0)), (512, (0, 8))], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_F17_alignment_of_items_and_of_bases(place, rng, op, item_size, leads):
    check(rng, place, make_case(rng, op, Shape(item_size, leads=leads, tokens=4), pairs=(np.arange(4), np.arange(4))))


@pytest.mark.parametrize("item_size", [576, 656])
@pytest.mark.parametrize("op", OPS)
def test_F18_item_sizes_of_the_models_are_served_without_a_warning(place, rng, op, item_size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(rng, place, make_case(rng, op, Shape(item_size)))


def test_F21_pools_in_mapped_memory(cpu_place, rng):
    memory = np.frombuffer(mmap.mmap(-1, 8 * 2**20), np.uint8)
    src, dst, order = memory[: 16 * 512].reshape(16, 512), np.zeros((16, 512), np.uint8), np.arange(16)
    src[:] = rng.integers(0, 256, src.shape)
    with cpu_place.options():
        kvcacheio.transfer_kv_per_layer_mla(src, dst, order, order[::-1].copy(), 512)
    assert np.array_equal(dst, src[::-1])
    tables = [np.array([pool.ctypes.data], np.uint64) for pool in (src, dst)]
    with cpu_place.options():
        kvcacheio.transfer_kv_all_layer_mla(*tables, order, order, 512, 1)
    assert np.array_equal(dst, src)


def test_F31_strided_indices(place, rng):
    placed = Placed(rng, place, make_case(rng, "transfer_kv_per_layer_mla", Shape(tokens=32), count=32))
    contiguous = placed.views["src_indices"]
    for name in ("src_indices", "dst_indices"):
        placed.views |= {"src_indices": contiguous[:16], "dst_indices": contiguous[:16]}
        placed.views[name] = contiguous[::2]
        with pytest.raises(ValueError, match=f"{name}: expected a contiguous tensor"):
            placed.launch()


def test_F32_pools_whose_memory_is_not_in_the_order_of_their_shape(place, rng):
    """Views that no plain address arithmetic serves are refused; those with an offset are served from there."""
    case = make_case(rng, "transfer_kv_per_layer_mla", Shape(64, tokens=32))
    placed = Placed(rng, place, case)
    whole = placed.views["dst"]
    permuted = whole.reshape(32, 2, 4, 8)
    permuted = (
        permuted.permute(0, 2, 1, 3)
        if torch is not None and isinstance(whole, torch.Tensor)
        else (permuted.transpose(0, 2, 1, 3))
    )
    for view in (permuted, whole.reshape(16, 2, 64)[:, 1], whole.reshape(16, 128)[:, :64]):
        placed.views["dst"] = view
        with pytest.raises(ValueError, match="dst: needs contiguous rows"):
            placed.launch()
    placed.views["dst"] = whole[10:]
    placed.case.indices["dst_indices"].view[:] = -1
    placed.views["src_indices"], placed.views["dst_indices"] = (
        placed.put(array, False)[1] for array in make_case(rng, case.op, case.shape, pairs=([3], [1])).indices.values()
    )
    placed.launch()
    after = placed.fetch()
    assert np.array_equal(after["dst[0]"].view[11], case.pools["src"][0].view[3])
    assert np.array_equal(np.delete(after["dst[0]"].view, 11, 0), np.delete(case.pools["dst"][0].view, 11, 0))


def test_F34_host_and_device_tokens_differ_everywhere(place, rng):
    """A pool of the layers 30 to 33: layer_id counts within it."""
    for layer_id in range(4):
        shape = Shape(48, num_layers=4, layer_id=layer_id, tokens=16, page_size=4, head_num=4)
        for op in ("transfer_kv_per_layer_pf_lf", "transfer_kv_per_layer_ph_lf", "transfer_kv_per_layer_mla_pf_lf"):
            check(rng, place, make_case(rng, op, shape, pairs=(np.arange(16)[::-1], np.arange(16))))
    case = make_case(rng, "transfer_kv_per_layer_mla_pf_lf", Shape(48, num_layers=4))
    for layer_id in (4, 30, 34, -1):
        case.sizes["layer_id"] = layer_id
        with pytest.raises(IndexError, match=f"layer_id: expected 0 to 3, got {layer_id}"):
            Placed(rng, place, case).launch()


@pytest.mark.parametrize("item_copy", ["wave", "chunk"])
@pytest.mark.parametrize("warp_size", [32, 64])
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_pools_is_touched(warp_size, item_copy):
    """The pages on both sides of either pool cannot be accessed, so one byte too many ends the process."""
    subprocess.run([sys.executable, __file__, str(warp_size), item_copy], check=True, timeout=300)


def transfer_between_unreadable_pages(warp_size: int, item_copy: str) -> None:
    rng = np.random.default_rng(0)
    src, dst = between_unreadable_pages(), between_unreadable_pages()
    src[:] = rng.integers(0, 256, len(src))
    with hisparse.cpu.options(warp_size=warp_size, item_copy=item_copy, strict=True):
        for item in (*range(1, 70), 132, 144, 508, 512, 516, 576, 584, 656, 1020, 1024, 1028, 1040, 2048):
            tokens = min(40, len(src) // item)
            size = tokens * item
            for a, b in ((src[:size], dst[:size]), (src[-size:], dst[-size:])):
                b[:] = 0
                kvcacheio.transfer_kv_per_layer_mla(a, b, np.arange(tokens), np.arange(tokens), item)
                assert np.array_equal(a, b), item


if __name__ == "__main__":
    transfer_between_unreadable_pages(int(sys.argv[1]), sys.argv[2])
