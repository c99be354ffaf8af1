"""Objects and numbers that are made to mislead: no overflow turns them into an access outside of the given pools."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
from places import GUARD_BYTES, Guarded
from right_calls import RIGHT_CALLS, public_ops
from test_errors import ARGUMENTS

import hisparse
from hisparse import kvcacheio

try:
    import torch
except ImportError:
    torch = None

EXTREME = [2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**48, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 2**200]
EXTREME += [-value for value in EXTREME] + [-(2**31) - 1, -1, 0]
REFUSALS = (ValueError, TypeError, IndexError, MemoryError)


# The device bounds a quota, and memory of the CPU target is reached from any device. The others may be zero.
MAY_FIT = {"block_quota", "device_index", "layer_id", "src_starts", "dst_starts", "lengths"}


def sizes_of(op: str) -> list[str]:
    """The arguments that are numbers, or lists of them."""
    parameters = inspect.signature(public_ops()[op]).parameters.values()
    return [p.name for p in parameters if p.annotation in ("int", "int | None", "Sequence[int]")]


@pytest.mark.parametrize("op", [op for op in RIGHT_CALLS if sizes_of(op)])
def test_sizes_of_any_magnitude(op):
    """Each of an op's sizes, and each two of them: refused by name, with nothing changed."""
    for first, second in itertools.combinations_with_replacement(sizes_of(op), 2):
        for value, other in zip(EXTREME, EXTREME if first == second else reversed(EXTREME), strict=True):
            arguments = RIGHT_CALLS[op]()
            before = [pool.copy() for pool in arguments.pools]
            for name, size in ((first, value), (second, other)):
                arguments[name] = [size] * len(arguments[name]) if isinstance(arguments[name], list) else size
            try:
                public_ops()[op](**arguments)
            except REFUSALS as error:
                names = (name.removeprefix("src_").removeprefix("dst_") for name in sizes_of(op))
                assert any(name in str(error) for name in names), error
                assert all(map(np.array_equal, arguments.pools, before))
            else:
                assert {first, second} <= MAY_FIT and min(value, other) >= 0
                assert all(name == "block_quota" or size < 2**31 for name, size in ((first, value), (second, other)))


def test_every_op_with_sizes_is_among_them():
    assert {op for op in RIGHT_CALLS if not sizes_of(op)} == {
        "translate_padded_hisparse_locations",
        "copy_all_layer_kv_cache_cpu",
    }
    assert {name for op in RIGHT_CALLS for name in sizes_of(op)} == {
        name
        for op in RIGHT_CALLS
        for name, value in RIGHT_CALLS[op]().items()
        if type(value) is int or (isinstance(value, list) and type(value[0]) is int) or value is None
    }


POOL = np.arange(64 * 96, dtype=np.uint8).reshape(64, 96)
INDICES = np.array([0, 3, 5])
TRANSFERS = {
    "transfer_kv_per_layer_mla": lambda dst, **sizes: kvcacheio.transfer_kv_per_layer_mla(
        POOL, dst, INDICES, INDICES, **{"item_size": 96, **sizes}
    ),
    "transfer_kv_per_layer_mla_pf_lf": lambda dst, **sizes: kvcacheio.transfer_kv_per_layer_mla_pf_lf(
        POOL, dst, INDICES, INDICES, **{"layer_id": 1, "item_size": 32, "src_layout_dim": 96, **sizes}
    ),
    "transfer_kv_per_layer_ph_lf": lambda dst, **sizes: kvcacheio.transfer_kv_per_layer_ph_lf(
        POOL,
        dst,
        POOL,
        dst,
        INDICES,
        INDICES,
        **{"layer_id": 1, "item_size": 32, "src_layout_dim": 96, "page_size": 4, "head_num": 2, **sizes},
    ),
    "transfer_kv_direct": lambda dst, **sizes: kvcacheio.transfer_kv_direct(
        [POOL], [dst], INDICES, INDICES, **{"page_size": 1, **sizes}
    ),
    "transfer_embedding_ranges_direct": lambda dst, **sizes: kvcacheio.transfer_embedding_ranges_direct(
        POOL, dst, **{name: [sizes.get(name, 1)] for name in ("src_starts", "dst_starts", "lengths")}
    ),
}
TRANSFER_SIZES = {
    "transfer_kv_per_layer_mla": ["item_size", "block_quota", "num_warps_per_block"],
    "transfer_kv_per_layer_mla_pf_lf": ["layer_id", "item_size", "src_layout_dim"],
    "transfer_kv_per_layer_ph_lf": ["layer_id", "item_size", "src_layout_dim", "page_size", "head_num"],
    "transfer_kv_direct": ["page_size"],
    "transfer_embedding_ranges_direct": ["src_starts", "dst_starts", "lengths"],
}


@pytest.mark.parametrize("op", TRANSFERS)
def test_transfers_of_any_magnitude(rng, op):
    pairs = list(itertools.combinations_with_replacement(TRANSFER_SIZES[op], 2))
    for first, second in pairs:
        for value, other in zip(EXTREME, EXTREME if first == second else reversed(EXTREME), strict=True):
            dst = Guarded.random(rng, np.uint8, POOL.shape)
            before = dst.copy()
            refused = False
            try:
                TRANSFERS[op](dst.view, **{first: value, second: other})
            except REFUSALS as error:
                refused = True
                assert any(name.removeprefix("src_") in str(error) for name in TRANSFER_SIZES[op]), error
            start, end = dst.start, dst.start + dst.span
            assert np.array_equal(dst.raw[:start], before.raw[:start]), (first, value, second, other)
            assert np.array_equal(dst.raw[end:], before.raw[end:]), (first, value, second, other)
            assert not refused or np.array_equal(dst.raw, before.raw)
    assert GUARD_BYTES >= 256


@pytest.mark.parametrize("loc", [2, 2**31, 2**40, 2**61, 2**62, 2**63 - 1])
@pytest.mark.parametrize("stride", [8, 2**33, 2**40, 2**62, 2**63 - 1])
@pytest.mark.parametrize("name", ["tgt_loc", "src_loc"])
def test_rows_of_layers_whose_address_would_wrap_around(name, stride, loc):
    """Products that come out small, or at another row of the layer, are no rows of it."""
    if loc * stride < 2**63 - 2**50:
        pytest.skip("it may be an address")
    layers = np.arange(4096, dtype=np.uint8).reshape(2, -1)
    before = layers.copy()
    arguments = {"tgt_loc": np.array([1, 1, -1]), "src_loc": np.array([0, 0, loc])}
    arguments[name][1] = loc
    strides = np.array([8, stride])
    with pytest.raises(ValueError, match=rf"^{name}: expected rows .* got {loc} at position 1, .* in layer [01]$"):
        kvcacheio.copy_all_layer_kv_cache_cpu(
            np.array([layer.ctypes.data for layer in layers], np.uint64), strides, **arguments
        )
    assert np.array_equal(layers, before)


# Strides


def strided(shape, strides, dtype=np.int32):
    return np.lib.stride_tricks.as_strided(np.zeros(64, dtype), shape, strides)


@pytest.mark.parametrize(
    ("name", "array", "named"),
    [
        ("top_k_tokens", strided((3, 4), (2**62, 4)), "a size that fits in memory"),
        ("top_k_tokens", strided((3, 4), (-(2**62), 4)), "a size that fits in memory"),
        ("top_k_tokens", strided((3, 2**58), (2**61, 4)), "a size that fits in memory"),
        ("top_k_tokens", strided((2**40, 4), (0, 4)), "at most 2147483647 rows"),
        ("top_k_device_locs", strided((3, 4), (8, 4)), "rows that do not overlap"),
        ("top_k_device_locs", strided((3, 4), (0, 4)), "rows that do not overlap"),
        ("top_k_device_locs", strided((3, 4), (-8, 4)), "rows that do not overlap"),
        ("top_k_device_locs", strided((3, 4), (17, 4)), "strides of whole elements"),
        ("lru_slots", strided((5, 8), (2**62, 2), np.int16), "a size that fits in memory"),
        ("device_buffer", strided((4, 16), (-16, 1), np.uint8), "contiguous rows"),
        ("miss_src", strided((3, 4), (2**62, 8), np.int64), "a size that fits in memory"),
    ],
)
def test_strides_of_any_magnitude(name, array, named):
    arguments = ARGUMENTS["swap_in"]()
    before = {key: value.copy() for key, value in arguments.items() if isinstance(value, np.ndarray) and key != name}
    with pytest.raises(ValueError, match=rf"^{name}: .*({named})"):
        hisparse.load_cache_to_device_buffer_mla(**arguments | {name: array})
    for key, value in before.items():
        assert np.array_equal(arguments[key], value), key


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_expanded_tensors_are_not_their_shape():
    arguments = ARGUMENTS["swap_in"]()
    arguments = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    for name, tensor in {
        "host_cache": torch.zeros(1, 16, dtype=torch.uint8).expand(2**40, 16),
        "device_buffer": torch.zeros(1, 16, dtype=torch.uint8).expand(2**40, 16),
        "top_k_device_locs": torch.zeros(1, 4, dtype=torch.int32).expand(3, 4),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            hisparse.load_cache_to_device_buffer_mla(**arguments | {name: tensor})


# Objects that say of themselves what is not so


class Liar(np.ndarray):
    """An array that describes itself by the class's attribute."""

    lies: dict = {}

    @property
    def __array_interface__(self):
        return {**np.ndarray.__array_interface__.__get__(self), **Liar.lies}


@pytest.mark.parametrize(
    "lies",
    [
        {"strides": ()},
        {"strides": (1,)},
        {"strides": (16, 1, 1)},
        {"shape": (4,), "strides": (16, 1)},
        {"shape": (-4, 16)},
        {"shape": (-4, -16)},
        {"shape": (2**63, 16)},
        {"shape": (2**62, 2**62)},
        {"shape": "wide"},
        {"shape": None},
        {"strides": (2**64, 1)},
        {"strides": 7},
        {"data": (0, False)},
        {"data": (-1, False)},
        {"data": (2**64, False)},
        {"data": ()},
        {"data": None},
        {"typestr": ""},
        {"typestr": 8},
    ],
)
@pytest.mark.parametrize("name", ["src", "dst"])
def test_arrays_that_lie(monkeypatch, lies, name):
    monkeypatch.setattr(Liar, "lies", lies)
    pools = {"src": np.arange(64, dtype=np.uint8).reshape(4, 16), "dst": np.zeros((4, 16), np.uint8)}
    before = {key: pool.copy() for key, pool in pools.items()}
    with pytest.raises((ValueError, TypeError), match=name):
        hisparse.copy_items(*(pools | {name: pools[name].view(Liar)}).values(), np.arange(2), np.arange(2), 16)
    for key, pool in pools.items():
        assert np.array_equal(pool, before[key])


@pytest.mark.parametrize("pages", [2**61, 2**62, 2**63 - 1])
@pytest.mark.parametrize("to_pages", [False, True])
def test_pools_of_more_tokens_than_numbers(monkeypatch, pages, to_pages):
    """Tokens without bytes: as many as one likes, and nothing to copy."""
    monkeypatch.setattr(Liar, "lies", {"shape": (pages, 8, 4, 0), "strides": None})
    pool, layer = np.zeros((1, 8, 4, 0), np.uint8).view(Liar), np.zeros((8, 0), np.uint8)
    indices = np.arange(4) + 2**62, np.arange(4)
    if to_pages:
        kvcacheio.transfer_kv_all_layer_direct_lf_pf([layer], [pool], *reversed(indices), 4)
    else:
        kvcacheio.transfer_kv_per_layer_direct_pf_lf([pool], [layer], *indices, 0, 4)


def test_tensors_that_lie(run):
    """Attributes of a torch tensor, where there is no exchange API."""
    run("""
        good = np.zeros((4, 16), np.uint8)
        indices = Tensor(np.arange(2))
        def refused(**lies):
            tensor = Tensor(good)
            for name, value in lies.items():
                setattr(tensor, name, value)
            for arguments in ((tensor, Tensor(good)), (Tensor(good), tensor)):
                try:
                    hisparse.copy_items(*arguments, indices, indices, 16)
                except (TypeError, ValueError) as error:
                    assert str(error).startswith(("src: ", "dst: ")), error
                else:
                    raise AssertionError(lies)
        refused(stride=lambda: ())
        refused(stride=lambda: (16,))
        refused(stride=lambda: (16, 1, 1))
        refused(stride=lambda: (2**64, 1))
        refused(stride=lambda: ("a", 1))
        refused(shape=(4,))
        refused(shape=(-4, 16))
        refused(shape=(2**62, 2**62), stride=lambda: (2**62, 1))
        refused(shape=(2**64, 16))
        refused(element_size=lambda: 2**62)
        refused(element_size=lambda: -1)
        refused(data_ptr=lambda: 2**64)
        refused(data_ptr=lambda: None)
        refused(data_ptr=lambda: 0)
        assert driver.launches == 0
        hisparse.copy_items(Tensor(good), Tensor(good), indices, indices, 16)
    """)
