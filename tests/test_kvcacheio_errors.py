"""What a wrong argument of hisparse.kvcacheio gets: an error that names it, what was expected and what came, before
anything is copied."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kvcacheio_cases import OPS, is_latent, side_names
from places import has_gpu

import hisparse
import hisparse.kvcacheio as kvcacheio

ITEM, LAYERS, TOKENS, PAGE, HEADS = 16, 3, 8, 2, 4
QUOTA = "SGLANG_HICACHE_BLOCK_QUOTA"
DIRECT_OPS = ("transfer_kv_direct", "transfer_kv_per_layer_direct_pf_lf", "transfer_kv_all_layer_direct_lf_pf")


def valid(op: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Arguments of a call, all of them, and every pool that it could change."""
    pools: list[np.ndarray] = []

    def pool(*shape: int) -> np.ndarray:
        pools.append(np.random.default_rng(len(pools)).integers(0, 256, shape, np.uint8))
        return pools[-1]

    arguments: dict[str, Any] = {"src_indices": np.arange(4), "dst_indices": np.arange(4, 8)}
    if op in OPS:
        for end, layout in zip(("src", "dst"), OPS[op], strict=True):
            for name in side_names(op, end):
                if layout == "table":
                    layers = [pool(TOKENS, ITEM) for _ in range(LAYERS)]
                    arguments[name] = np.array([layer.ctypes.data for layer in layers], np.uint64)
                else:
                    arguments[name] = pool(TOKENS, ITEM * (1 if layout == "lf" else LAYERS))
        sizes = {"layer_id": 1, "item_size": ITEM, "num_layers": LAYERS, "page_size": PAGE, "head_num": HEADS}
        sizes |= {"src_layout_dim": LAYERS * ITEM, "dst_layout_dim": LAYERS * ITEM}
        sizes |= {"block_quota": 2, "num_warps_per_block": 4}
        arguments |= {
            name: sizes[name] for name in inspect.signature(getattr(kvcacheio, op)).parameters if name in sizes
        }
    elif op == "transfer_embedding_ranges_direct":
        arguments = {
            "src": pool(6, 3),
            "dst": pool(7, 3),
            "src_starts": [0, 4],
            "dst_starts": [1, 5],
            "lengths": [3, 2],
        }
    elif op == "copy_all_layer_kv_cache_cpu":
        layers = [pool(6, 5) for _ in range(2)]
        addresses = np.array([layer.ctypes.data for layer in layers], np.uint64)
        locs = {"tgt_loc": np.array([3, 4]), "src_loc": np.array([0, 1])}
        arguments = {"data_ptrs": addresses, "strides": np.full(2, 5), **locs}
    elif op == "get_device_accessible_ptr":
        arguments = {"tensor": pool(6, 5), "device_index": 0}
    else:
        layers = [pool(TOKENS, 2, 8) for _ in range(2 * LAYERS)]
        pages = [pool(TOKENS // PAGE, LAYERS + 1, PAGE, 2, 8) for _ in range(2)]
        lists = {
            "transfer_kv_direct": ("src_layers", layers[:LAYERS], "dst_layers", layers[LAYERS:]),
            "transfer_kv_per_layer_direct_pf_lf": ("src_ptrs", pages, "dst_ptrs", layers),
            "transfer_kv_all_layer_direct_lf_pf": ("src_ptrs", layers, "dst_ptrs", pages),
        }[op]
        arguments |= {lists[0]: lists[1], lists[2]: lists[3], "page_size": PAGE}
        if op == "transfer_kv_per_layer_direct_pf_lf":
            arguments["layer_id"] = 1
    return arguments, pools


ALL_OPS = (
    *OPS,
    *DIRECT_OPS,
    "transfer_embedding_ranges_direct",
    "copy_all_layer_kv_cache_cpu",
    "get_device_accessible_ptr",
)


def strided(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2, axis=-1)[..., ::2]


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def misaligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(array.tobytes(), np.uint8)
    return raw[1:].view(array.dtype)


Wrong = tuple[str, type[Exception], Callable[[Any], Any], str]  # kind, error, change, what the error says


def wrong_ints(name: str) -> Iterator[Wrong]:
    for value in ("3", 1.5, True, [1]):
        yield repr(value), TypeError, lambda _, value=value: value, f"{name}: expected an int, got "
    if name in ("layer_id",):
        yield "-1", IndexError, lambda _: -1, "layer_id: expected .*got -1"
        yield "past the last", IndexError, lambda _: LAYERS + 1, f"layer_id: expected .*got {LAYERS + 1}"
        return
    for value in (0, -1, -(2**70)) if name != "device_index" else (-1, -(2**70)):
        yield repr(value), ValueError, lambda _, value=value: value, f"{name}: expected .*got "
    yield "2**64", ValueError, lambda _: 2**64, f"{name}: expected|layout_dim"
    if name != "num_warps_per_block":
        yield "None", TypeError, lambda _: None, f"{name}: expected an int, got NoneType"


def wrong_vectors(name: str, dtype: str) -> Iterator[Wrong]:
    others = {"int64": (np.int32, np.float64, np.uint64), "uint64": (np.int64, np.uint32, np.float64)}[dtype]
    for other in others:
        yield other.__name__, TypeError, lambda a, other=other: a.astype(other), f"{name}: expected dtype {dtype}, got "
    yield "strided", ValueError, strided, f"{name}: expected a contiguous tensor"
    yield "2-D", ValueError, lambda a: a.reshape(1, -1), f"{name}: expected shape"
    yield "misaligned", ValueError, misaligned, f"{name}: expected data aligned to 8 bytes"
    yield "longer", ValueError, lambda a: np.concatenate([a, a]), r"expected shape \[\d+\], got|page_size"
    yield "a list", TypeError, lambda a: a.tolist(), f"{name}: expected a dense torch.Tensor or numpy.ndarray, got list"


def wrong_pools(name: str, least: int) -> Iterator[Wrong]:
    yield "transposed", ValueError, lambda a: np.ascontiguousarray(a.T).T, f"{name}: needs contiguous rows"
    yield "every other row", ValueError, lambda a: np.repeat(a, 2, axis=0)[::2], f"{name}: needs contiguous rows"
    yield "None", TypeError, lambda _: None, f"{name}: expected a dense torch.Tensor or numpy.ndarray, got NoneType"
    if least > 1:
        short = lambda a: a.reshape(-1)[: least - 1]  # noqa: E731
        yield "short", ValueError, short, f"{name}: expected room for at least one item of .* = {least}, got"
    if name.startswith("dst"):
        yield "read-only", ValueError, read_only, f"{name}: expected a writable array"


def in_list(change: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    return lambda group: [change(array) if i == n else array for i, array in enumerate(group)]


def wrong_lists(op: str, name: str) -> Iterator[Wrong]:
    yield "empty", ValueError, lambda _: [], f"{name}: expected at least one tensor"
    yield "a tensor", TypeError, lambda group: group[0], f"{name}: expected a list of tensors, got numpy.ndarray"
    if len(valid(op)[0][name]) > 2:
        yield (
            "one fewer",
            ValueError,
            lambda group: group[:-1],
            r"_(layers|ptrs): expected (\d tensors, |as many layers)",
        )
    for kind, error, change, message in wrong_pools(name, 0):
        yield f"{kind} in it", error, in_list(change, 1), message.replace(f"{name}:", rf"{name}\[1\]:")
    yield "wider tokens", ValueError, in_list(lambda a: np.repeat(a, 2, axis=-1), 1), r"expected tokens of \d+ bytes"


def wrong_sequences(name: str) -> Iterator[Wrong]:
    yield "an int", TypeError, lambda _: 3, f"{name}: expected a sequence of ints, got int"
    yield "a str", TypeError, lambda _: "34", f"{name}: expected a sequence of ints, got str"
    yield "floats", TypeError, lambda _: [0.0, 1.0], f"{name}: expected an int, got float"
    yield "negative", ValueError, lambda _: [0, -1], f"{name}: expected at least 0, got -1"
    yield "longer", ValueError, lambda values: [*values, 0], "_starts: expected . entries, as in lengths"
    yield "past the end", ValueError, lambda values: [values[0], 6], "_starts: expected ranges within the . rows of"
    yield "far past the end", ValueError, lambda _: [0, 2**63 - 1], "_starts: expected ranges within the . rows of"


def wrong_values(op: str, name: str) -> Iterator[Wrong]:
    if name in ("src_starts", "dst_starts", "lengths"):
        yield from wrong_sequences(name)
    elif name in ("src_layers", "dst_layers", "src_ptrs", "dst_ptrs") and op in DIRECT_OPS:
        yield from wrong_lists(op, name)
    elif name.endswith(("_layers", "data_ptrs")) and name != "num_layers":
        yield from wrong_vectors(name, "uint64")
    elif name.endswith(("_indices", "_loc")) or name == "strides":
        yield from wrong_vectors(name, "int64")
    elif op == "get_device_accessible_ptr" and name == "tensor":
        yield "None", TypeError, lambda _: None, "tensor: expected a dense torch.Tensor or numpy.ndarray, got NoneType"
        yield "strided", ValueError, strided, "tensor: expected row-major storage"
    elif op == "transfer_embedding_ranges_direct" and name in ("src", "dst"):
        yield from wrong_pools(name, 0)
        yield "1-D", ValueError, lambda a: a.reshape(-1), rf"{name}: expected shape \[rows, columns\]"
        yield "another dtype", TypeError, lambda a: a.view(np.int8), "dst: expected dtype .*as src, got"
        yield "wider", ValueError, lambda a: np.repeat(a, 2, axis=1), "dst: expected . columns, as in src, got"
    elif name.startswith(("src_k", "src_v", "dst_k", "dst_v")) or name in ("src", "dst"):
        layout = OPS[op][name.startswith("dst")]
        yield from wrong_pools(name, ITEM * {"lf": 1, "pf": LAYERS, "ph": LAYERS * PAGE}[layout])
    else:
        yield from wrong_ints(name)


def may_be_none(op: str, name: str) -> bool:
    return name == "block_quota" and is_latent(op) and "per_layer" in op


CASES = [
    pytest.param(op, name, wrong, id=f"{op}-{name}-{wrong[0]}")
    for op in ALL_OPS
    for name in valid(op)[0]
    for wrong in wrong_values(op, name)
    if not (wrong[0] == "None" and may_be_none(op, name))
]


def refused(op: str, arguments: dict[str, Any], pools: list[np.ndarray], error: type[Exception], match: str) -> None:
    before = [pool.copy() for pool in pools]
    with pytest.raises(error, match=match) as raised:
        getattr(kvcacheio, op)(**arguments)
    assert type(raised.value) is error
    assert all(map(np.array_equal, pools, before))


@pytest.mark.parametrize(("op", "name", "wrong"), CASES)
def test_wrong_arguments(op, name, wrong):
    kind, error, change, message = wrong
    arguments, pools = valid(op)
    arguments[name] = change(arguments[name])
    refused(op, arguments, pools, error, message)


@pytest.mark.parametrize("op", ALL_OPS)
def test_the_right_arguments(op):
    if op == "get_device_accessible_ptr" and has_gpu():
        pytest.skip("a GPU does not reach this memory")
    arguments, pools = valid(op)
    before = [pool.copy() for pool in pools]
    getattr(kvcacheio, op)(**arguments)
    assert op == "get_device_accessible_ptr" or not all(map(np.array_equal, pools, before))


@pytest.mark.parametrize("op", OPS)
def test_empty_indices_are_checked_all_the_same(op):
    arguments, pools = valid(op)
    arguments |= {"src_indices": np.arange(0), "dst_indices": np.arange(0)}
    before = [pool.copy() for pool in pools]
    getattr(kvcacheio, op)(**arguments)
    assert all(map(np.array_equal, pools, before))
    refused(op, arguments | {"item_size": 0}, pools, ValueError, "item_size")
    refused(op, arguments | {"num_warps_per_block": 1024}, pools, ValueError, "num_warps_per_block")


@pytest.mark.parametrize("op", [op for op, layouts in OPS.items() if {"pf", "ph"} & set(layouts)])
def test_layers_that_do_not_fit_in_layout_dim(op):
    arguments, pools = valid(op)
    name = "src_layout_dim" if "src_layout_dim" in arguments else "dst_layout_dim"
    least = ITEM * (LAYERS if "num_layers" in arguments else 1)
    refused(op, arguments | {name: least - HEADS}, pools, ValueError, f"{name}: expected at least .* = {least}, got")
    if "layer_id" in arguments:
        refused(op, arguments | {"layer_id": LAYERS}, pools, IndexError, "layer_id: expected 0 to 2, got 3")
        refused(op, arguments | {"layer_id": 2**62}, pools, IndexError, "layer_id")


@pytest.mark.parametrize("op", [op for op, layouts in OPS.items() if "table" in layouts])
@pytest.mark.parametrize("num_layers", [LAYERS - 1, LAYERS + 1])
def test_another_number_of_layers_than_the_table_has(op, num_layers):
    arguments, pools = valid(op)
    table = next(name for name in arguments if name.endswith("_layers"))
    wrong = arguments | {"num_layers": num_layers, "dst_layout_dim": 4 * LAYERS * ITEM}
    wrong = {name: wrong[name] for name in arguments}
    for pool in side_names(op, "dst"):
        if not pool.endswith("_layers"):
            wrong[pool] = np.zeros((16, LAYERS * ITEM), np.uint8)
    refused(op, wrong, pools, ValueError, rf"{table}: expected shape \[{num_layers}\], got \(3,\)")


@pytest.mark.parametrize("op", ["transfer_kv_per_layer_ph_lf", "transfer_kv_all_layer_lf_ph"])
def test_heads_that_do_not_divide(op):
    arguments, pools = valid(op)
    refused(op, arguments | {"head_num": 3}, pools, ValueError, "head_num: expected a divisor of item_size = 16, got 3")
    layout = "src_layout_dim" if "src_layout_dim" in arguments else "dst_layout_dim"
    grown = arguments | {layout: LAYERS * ITEM + 2}
    refused(op, grown, pools, ValueError, "head_num: expected a divisor of layout_dim = 50, got 4")
    refused(op, arguments | {"page_size": 9}, pools, ValueError, "expected room for at least one item of page_size")


@pytest.mark.parametrize("warp_size", [32, 64])
def test_warps_of_a_block(warp_size):
    arguments, pools = valid("transfer_kv_per_layer_mla")
    with hisparse.cpu.options(warp_size=warp_size):
        kvcacheio.transfer_kv_per_layer_mla(**arguments | {"num_warps_per_block": 1024 // warp_size})
        kvcacheio.transfer_kv_per_layer_mla(**arguments | {"num_warps_per_block": None})
        wrong = arguments | {"num_warps_per_block": 1024 // warp_size + 1}
        message = f"num_warps_per_block: expected at most {1024 // warp_size} warps of {warp_size} threads"
        refused("transfer_kv_per_layer_mla", wrong, pools, ValueError, message)


@pytest.mark.parametrize("op", ["transfer_kv_per_layer_mla", "transfer_kv_per_layer_mla_pf_lf"])
def test_F41_the_quota_of_the_environment(monkeypatch, op):
    arguments, pools = valid(op)
    by_default = arguments | {"block_quota": None}
    for value in ("0", "-2", "2.5", "two", " 2", "+2", "0x2", "2 "):
        monkeypatch.setenv(QUOTA, value)
        refused(op, by_default, pools, ValueError, f"{QUOTA}: expected a positive integer, got '")
        nothing = {"src_indices": np.arange(0), "dst_indices": np.arange(0)}
        refused(op, by_default | nothing, pools, ValueError, QUOTA)
        getattr(kvcacheio, op)(**arguments)  # an explicit one wins
    for value in ("", "1", "5", "999999999999999999999"):
        monkeypatch.setenv(QUOTA, value)
        getattr(kvcacheio, op)(**by_default)
    monkeypatch.delenv(QUOTA)
    getattr(kvcacheio, op)(**by_default)


def test_other_ops_do_not_read_the_environment(monkeypatch):
    monkeypatch.setenv(QUOTA, "many")
    for op in OPS:
        if not may_be_none(op, "block_quota"):
            arguments, _ = valid(op)
            del arguments["block_quota"]
            getattr(kvcacheio, op)(**arguments)


@pytest.mark.parametrize("op", DIRECT_OPS)
def test_indices_of_direct_ops(op):
    arguments, pools = valid(op)
    for name, at in itertools.product(("src_indices", "dst_indices"), range(4)):
        for value in (-1, -(2**63)):
            wrong = arguments[name].copy()
            wrong[at] = value
            message = f"{name}: expected indices of at least 0, got {value} at position {at}"
            refused(op, arguments | {name: wrong}, pools, ValueError, message)
        if at % PAGE == 0:
            for value in (TOKENS, TOKENS + PAGE, 2**62):
                wrong = arguments[name].copy()
                wrong[at] = value
                message = f"{name}: expected .* within 8 tokens, got {value} at position {at}"
                refused(op, arguments | {name: wrong}, pools, ValueError, message)
    message = "src_indices: expected a length that page_size = 3 divides, got 4"
    refused(op, arguments | {"page_size": 3}, pools, ValueError, message)


def test_pages_of_direct_ops():
    for op, paged, plain in (
        ("transfer_kv_per_layer_direct_pf_lf", "src", "dst"),
        ("transfer_kv_all_layer_direct_lf_pf", "dst", "src"),
    ):
        arguments, pools = valid(op)
        off = {f"{paged}_indices": np.array([1, 2, 4, 5])}
        refused(op, arguments | off, pools, ValueError, f"{paged}_indices: expected pages that start at a multiple of")
        past = {f"{plain}_indices": np.array([TOKENS - 1, 0, 1, 2])}
        refused(op, arguments | past, pools, ValueError, f"{plain}_indices: expected pages within 8 tokens, got 7")
        shape = rf"{paged}_ptrs\[0\]: expected shape \[pages, layers, page_size = 4, ...\]"
        refused(op, arguments | {"page_size": 4}, pools, ValueError, shape)
        three = {f"{paged}_ptrs": [arguments[f"{paged}_ptrs"][0]] * 3}
        refused(op, arguments | three, pools, ValueError, f"{paged}_ptrs: expected one pool, or one of keys")
        flat = {f"{paged}_ptrs": [a.reshape(TOKENS // PAGE, -1) for a in arguments[f"{paged}_ptrs"]]}
        refused(op, arguments | flat, pools, ValueError, rf"{paged}_ptrs\[0\]: expected at least 3 dimensions")
    many = {"src_ptrs": [arguments["src_ptrs"][0]] * 10}
    refused(op, arguments | many, pools, IndexError, "layer_id: expected layers within 0 to 3 of")


def test_layers_and_strides_of_the_copy_within_layers():
    arguments, pools = valid("copy_all_layer_kv_cache_cpu")
    for strides in ([5, 0], [-1, 5]):
        wrong = arguments | {"strides": np.array(strides)}
        refused("copy_all_layer_kv_cache_cpu", wrong, pools, ValueError, "strides: expected at least 1 byte, got")
    wrong = arguments | {"data_ptrs": np.array([0, 1], np.uint64)}
    refused("copy_all_layer_kv_cache_cpu", wrong, pools, ValueError, "data_ptrs: expected an address, got 0 in layer 0")
