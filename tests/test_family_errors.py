"""What a wrong argument of the swap-in's relatives gets. What they share with the plain op is checked by the same code;
so each kind of fault stands here once per argument, and what is theirs alone in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from test_errors import (  # noqa: F401
    as_library,
    class_name,
    content,
    library,
    misaligned,
    overlapping,
    read_only,
    strided,
)

import hisparse

B, K, H, PAGE, REQUESTS, TOKENS = 3, 4, 8, 2, 5, 64
PAGE_BYTES = 37_440
OPS = {
    "dsv4": hisparse.load_cache_to_device_buffer_dsv4_mla,
    "blocks": hisparse.load_blocks_to_device_buffer_mha,
    "planned": hisparse.copy_cache_planned_mla,
    "planned_dsv4": hisparse.copy_cache_planned_mla,
    "transfer": hisparse.transfer_cache_dsv4_mla,
}


def pages(rng, count: int) -> np.ndarray:
    return rng.integers(0, 256, (count, PAGE_BYTES), np.uint8)


def tables(rng) -> dict[str, Any]:
    return {
        "device_buffer_tokens": np.full((REQUESTS, H + PAGE), -1, np.int32),
        "host_cache_locs": np.tile(np.arange(TOKENS), (REQUESTS, 1)),
        "device_buffer_locs": rng.permutation(REQUESTS * (H + PAGE)).astype(np.int32).reshape(REQUESTS, H + PAGE),
        "req_pool_indices": np.array([3, 0, 4]),
        "seq_lens": np.full(B, TOKENS, np.int32),
        "lru_slots": np.tile(np.arange(H, dtype=np.int16), (REQUESTS, 1)),
        "hot_buffer_size": H,
        "page_size": PAGE,
        "block_size": 64,
        "num_real_reqs": np.array([B], np.int32),
        "skip_io": False,
        "blocks_per_request": None,
    }


def dsv4_arguments() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return tables(rng) | {
        "top_k_tokens": rng.integers(0, 60, (B, K)).astype(np.int32),
        "host_cache": pages(rng, 1),
        "device_buffer": pages(rng, 1),
        "top_k_device_locs": np.full((B, K), 77, np.int32),
        "item_size_bytes": 584,
        "num_top_k": K,
        "miss_src": np.full((B, K), 77, np.int64),
        "miss_dst": np.full((B, K), 77, np.int32),
        "miss_count": np.full(B, 77, np.int32),
    }


def blocks_arguments() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    pools = {f"host_cache_{x}": rng.integers(0, 256, (TOKENS, 16), np.uint8) for x in "kv"}
    pools |= {f"device_buffer_{x}": rng.integers(0, 256, (REQUESTS * (H + PAGE), 16), np.uint8) for x in "kv"}
    return tables(rng) | {
        "top_k_blocks": rng.integers(0, 30, (B, 2)).astype(np.int32),
        **pools,
        "top_k_device_locs": np.full((B, K), 77, np.int32),
        "item_size_bytes": 16,
        "sparse_block_size": 2,
    }


def planned_arguments() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "miss_src": rng.integers(0, 20, (B, K)),
        "miss_dst": rng.permutation(B * K).astype(np.int32).reshape(B, K),
        "miss_count": np.array([1, 4, 2], np.int32),
        "num_real_reqs": np.array([B], np.int32),
        "host_cache": rng.integers(0, 256, (20, 16), np.uint8),
        "device_buffer": rng.integers(0, 256, (20, 16), np.uint8),
        "item_size_bytes": 16,
        "num_blocks": 2,
        "block_size": 64,
        "is_dsv4_layout": False,
        "skip_io": False,
    }


def planned_dsv4_arguments() -> dict[str, Any]:
    rng = np.random.default_rng(4)
    pools = {"host_cache": pages(rng, 1), "device_buffer": pages(rng, 1)}
    return planned_arguments() | pools | {"item_size_bytes": 584, "is_dsv4_layout": True}


POOLS_OF_LAYERS = [pages(np.random.default_rng(5), 1) for _ in range(4)]


def transfer_arguments() -> dict[str, Any]:
    for pool in POOLS_OF_LAYERS[2:]:
        pool[:] = 0
    addresses = np.array([pool.ctypes.data for pool in POOLS_OF_LAYERS], np.uint64)
    return {
        "src_ptrs": addresses[:2].copy(),
        "dst_ptrs": addresses[2:].copy(),
        "src_indices": np.arange(6),
        "dst_indices": np.arange(6)[::-1].copy(),
        "block_size": 64,
    }


ARGUMENTS = {
    "dsv4": dsv4_arguments,
    "blocks": blocks_arguments,
    "planned": planned_arguments,
    "planned_dsv4": planned_dsv4_arguments,
    "transfer": transfer_arguments,
}
POOLS = {"host_cache", "device_buffer", *(f"{pool}_{x}" for pool in ("host_cache", "device_buffer") for x in "kv")}
OPTIONAL = {"dsv4": {"num_real_reqs", "miss_src", "miss_dst", "miss_count", "blocks_per_request"}}
OPTIONAL["blocks"] = {"num_real_reqs", "blocks_per_request"}
WRITTEN = {
    "device_buffer_tokens",
    "top_k_device_locs",
    "lru_slots",
    "device_buffer",
    "device_buffer_k",
    "device_buffer_v",
}


def writes(op: str, name: str) -> bool:
    return name in WRITTEN or (op == "dsv4" and name.startswith("miss_"))


@dataclass
class Wrong:
    """A wrong argument: what it is turned into, and what the error says of it."""

    op: str
    argument: str
    kind: str
    change: Any  # a function of the right value
    error: type[Exception]
    expected: str = ""
    got: str = ""
    named: str | None = None  # where the error names another argument

    def __str__(self) -> str:
        return f"{self.op}-{self.argument}-{self.kind}"


def wrong_tensors():
    for op, make in ARGUMENTS.items():
        for name, value in make().items():
            if not isinstance(value, np.ndarray):
                continue

            def wrong(kind, change, error, expected="", got="", op=op, name=name):
                return Wrong(op, name, kind, change, error, expected, got)

            for what in ([1, 2], 5, "text"):
                kind = type(what).__name__
                yield wrong(kind, lambda _, what=what: what, TypeError, "torch.Tensor or numpy.ndarray", kind)
            if name not in OPTIONAL.get(op, ()):
                yield wrong("None", lambda _: None, TypeError, "torch.Tensor or numpy.ndarray", "NoneType")
            if writes(op, name):
                yield wrong("read-only", read_only, ValueError, "writable", "read-only")
            if name in POOLS:
                yield wrong("strided", strided, ValueError, "row-major", "strides")
                yield wrong("too-small", lambda a: a.reshape(-1)[:15], ValueError, "one item", "15 bytes")
                continue
            either = name in ("req_pool_indices", "seq_lens")
            wanted = "int32 or int64" if either else value.dtype.name
            for dtype in ("int16", "int32", "int64", "uint32", "float32", "bool"):
                if dtype not in wanted or (dtype == "int64" and wanted == "uint64"):
                    yield wrong(dtype, lambda a, dtype=dtype: a.astype(dtype), TypeError, wanted, dtype)
            yield wrong("rank+1", lambda a: a[None], ValueError, "[", str(value[None].shape))
            yield wrong("rank-1", lambda a: a[0, ...], ValueError, "[", str(value[0].shape))
            yield wrong("misaligned", misaligned, ValueError, "aligned", "address")
            if value.shape[-1] > 1:
                yield wrong("strided", strided, ValueError, "contiguous", "strides")
            if writes(op, name) and value.ndim == 2:
                yield wrong("overlapping", overlapping, ValueError, "overlap", "strides")


SIZES = {
    "item_size_bytes": f"1 to {2**30}",
    "num_top_k": "at least 1",
    "hot_buffer_size": "at least 1",
    "page_size": "at least 1",
    "block_size": "at least 1",
    "sparse_block_size": "at least 1",
    "num_blocks": "1 to 65535",
    "blocks_per_request": "1 to 64",
}


def wrong_numbers():
    for op, make in ARGUMENTS.items():
        for name in make():
            if name in ("skip_io", "is_dsv4_layout"):
                for what in ("yes", None, 1.0):
                    yield Wrong(op, name, f"{what!r}", lambda _, v=what: v, TypeError, "a bool", class_name(what))
                yield Wrong(op, name, "2", lambda _: 2, ValueError, "0 to 1", "2")
            if name not in SIZES:
                continue
            for what in ("4", 1.5, True, np.ones(1, np.int32)):
                yield Wrong(op, name, f"{what!r:.12}", lambda _, v=what: v, TypeError, "an int", class_name(what))
            for number in (0, -1, -(1 << 63)):
                yield Wrong(op, name, str(number), lambda _, n=number: n, ValueError, SIZES[name], str(number))
            yield Wrong(op, name, "2**70", lambda _: 1 << 70, ValueError, "1", "2**63 or more")


def other_wrong_values():
    def wider(array):
        return np.zeros((len(array), array.shape[1] + 1), array.dtype)

    def shorter(array):
        return array[:-1]

    def at_an_odd_word(array):
        raw = np.zeros(array.nbytes + 8, np.uint8)
        return raw[4 : 4 + array.nbytes].reshape(array.shape)

    for op in ("dsv4", "planned_dsv4"):
        for size in (583, 585, 576, 8):
            yield Wrong(op, "item_size_bytes", str(size), lambda _, n=size: n, ValueError, "584", str(size))
        for name in ("host_cache", "device_buffer"):
            yield Wrong(op, name, "4-aligned", at_an_odd_word, ValueError, "aligned to 8 bytes", "address")
            smaller = (lambda a: a.reshape(-1)[:-1], ValueError, f"= {PAGE_BYTES}", f"{PAGE_BYTES - 1} bytes")
            yield Wrong(op, name, "part-of-a-page", *smaller)
    for op in ("dsv4", "blocks"):
        yield Wrong(op, "hot_buffer_size", "32769", lambda _: 32769, ValueError, "at most 32768", "32769")
        yield Wrong(op, "hot_buffer_size", "K-1", lambda _: K - 1, ValueError, "at least ", str(K - 1))
        yield Wrong(op, "blocks_per_request", "65", lambda _: 65, ValueError, "1 to 64", "65")
        names = ("device_buffer_locs", wider, ValueError, "row stride of device_buffer_tokens", str(H + PAGE + 1))
        yield Wrong(op, names[0], "wider", *names[1:])
    for op in OPS:
        for size in (1, 65, 1000):
            multiple = (lambda _, n=size: n, ValueError, "multiple of the warp size, 64", str(size))
            yield Wrong(op, "block_size", str(size), *multiple)
        for size in (1088, 1 << 40):
            yield Wrong(op, "block_size", str(size), lambda _, n=size: n, ValueError, "at most 1024", str(size))
    for name in ("miss_src", "miss_dst", "miss_count"):
        yield Wrong("dsv4", name, "None", lambda _: None, ValueError, "all given", "None")

    product = "top_k_blocks.shape[1] * sparse_block_size = 2 * "
    for size in (5, 1 << 62):
        too_large = (lambda _, n=size: n, ValueError, f"{product}{size}", str(H), "hot_buffer_size")
        yield Wrong("blocks", "sparse_block_size", str(size), *too_large)
    none = (lambda a: a[:, :0], ValueError, "at least 1]", f"({B}, 0)")
    yield Wrong("blocks", "top_k_blocks", "no-blocks", *none)
    narrow = (lambda a: a[:, :-1], ValueError, "sparse_block_size = 4]", f"({B}, {K - 1})")
    yield Wrong("blocks", "top_k_device_locs", "narrow", *narrow)
    for name in sorted(POOLS - {"host_cache", "device_buffer"}):
        rows = "rows of item_size_bytes = 16 bytes"
        yield Wrong("blocks", name, "flat", lambda a: a.reshape(-1), ValueError, rows, "rows of 1")
        yield Wrong("blocks", name, "wide-rows", lambda a: a.reshape(-1, 32), ValueError, rows, "rows of 32")
        interleaved = (lambda a: np.concatenate([a, a], 1)[:, :16], ValueError, "row-major", "strides")
        yield Wrong("blocks", name, "interleaved", *interleaved)

    for op in ("planned", "planned_dsv4"):
        yield Wrong(op, "miss_dst", "wider", wider, ValueError, "row stride of miss_src", str(K + 1))
        yield Wrong(op, "miss_dst", "shorter", shorter, ValueError, f"shape [{B}, ", f"({B - 1}, {K})")
        yield Wrong(op, "miss_count", "shorter", shorter, ValueError, f"[{B}]", f"({B - 1},)")
        yield Wrong(op, "miss_src", "no-columns", lambda a: a[:, :0], ValueError, "at least columns = 1]", f"({B}, 0)")
        yield Wrong(op, "num_real_reqs", "empty", lambda a: a[:0], ValueError, "at least 1", "(0,)")
        yield Wrong(op, "num_blocks", "65536", lambda _: 65536, ValueError, "1 to 65535", "65536")
        many = (lambda a: np.broadcast_to(a[:1], (1 << 30, K)), ValueError, "fewer than 2**31", f"({1 << 30}, {K})")
        yield Wrong(op, "miss_src", "huge", *many)
    yield Wrong("transfer", "dst_ptrs", "shorter", shorter, ValueError, "[2]", "(1,)")
    yield Wrong("transfer", "dst_indices", "shorter", shorter, ValueError, "[6]", "(5,)")


CASES = [*wrong_tensors(), *wrong_numbers(), *other_wrong_values()]


def refused(op: str, arrays: dict[str, Any], given: dict[str, Any], error: type[Exception]) -> str:
    before = content(arrays) | {str(i): pool.tobytes() for i, pool in enumerate(POOLS_OF_LAYERS)}
    with pytest.raises(error) as raised:
        OPS[op](**given)
    assert raised.type is error
    assert content(arrays) | {str(i): pool.tobytes() for i, pool in enumerate(POOLS_OF_LAYERS)} == before
    return str(raised.value)


@pytest.mark.parametrize("wrong", CASES, ids=str)
def test_wrong_arguments(library, wrong):  # noqa: F811
    arrays = ARGUMENTS[wrong.op]()
    given = {name: as_library(value, library) for name, value in arrays.items()}
    given[wrong.argument] = as_library(wrong.change(arrays[wrong.argument]), library)
    message = refused(wrong.op, arrays, given, wrong.error)
    head, _, got = message.partition(", got ")
    name, _, expected = head.partition(": ")
    assert name == (wrong.named or wrong.argument), message
    assert "expected " in expected and wrong.expected in expected, message
    assert got and wrong.got in got, message


def test_every_argument_is_covered():
    for op, make in ARGUMENTS.items():
        assert {wrong.argument for wrong in CASES if wrong.op == op} == set(make())
    assert len({str(wrong) for wrong in CASES}) == len(CASES)


@pytest.mark.parametrize("op", OPS)
def test_the_right_arguments_pass(library, op):  # noqa: F811
    arrays = ARGUMENTS[op]()
    before = content(arrays) | {str(i): pool.tobytes() for i, pool in enumerate(POOLS_OF_LAYERS)}
    OPS[op](**{name: as_library(value, library) for name, value in arrays.items()})
    assert content(arrays) | {str(i): pool.tobytes() for i, pool in enumerate(POOLS_OF_LAYERS)} != before


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_do_is_checked_too(library, op):  # noqa: F811
    arrays = ARGUMENTS[op]()
    per_row = ("top_k_tokens", "top_k_blocks", "top_k_device_locs", "req_pool_indices", "seq_lens", "miss_src")
    for name in (*per_row, "miss_dst", "miss_count", "src_indices", "dst_indices"):
        if name in arrays:
            arrays[name] = arrays[name][:0]
    given = {name: as_library(value, library) for name, value in arrays.items()}
    before = content(arrays)
    OPS[op](**given)
    assert content(arrays) == before
    assert "block_size" in refused(op, arrays, given | {"block_size": 1000}, ValueError)


@pytest.mark.parametrize("op", ["dsv4", "blocks"])
def test_shared_memory_that_is_too_small(op):
    arrays = ARGUMENTS[op]()
    with hisparse.cpu.options(shared_memory_bytes=300):
        message = refused(op, arrays, arrays, ValueError)
    assert "hot_buffer_size: expected " in message and " 300 bytes" in message and "got 4 and 8" in message


def test_more_entries_than_a_row_can_have():
    arrays = blocks_arguments()
    rows, entries = REQUESTS, 32_768
    slots = entries + PAGE
    arrays |= {"sparse_block_size": entries // 2, "hot_buffer_size": entries}
    arrays["device_buffer_tokens"] = arrays["device_buffer_locs"] = np.zeros((rows, slots), np.int32)
    arrays["lru_slots"] = np.zeros((rows, entries), np.int16)
    arrays["top_k_device_locs"] = np.zeros((B, entries), np.int32)
    message = refused("blocks", arrays, arrays, ValueError)
    assert message.startswith("sparse_block_size: expected ") and "32766" in message and "got 32768" in message


@pytest.mark.parametrize("op", OPS)
def test_arguments_that_the_functions_do_not_have(op):
    arguments = ARGUMENTS[op]()
    with pytest.raises(TypeError, match="pool_size"):
        OPS[op](**arguments, pool_size=3)
    del arguments[next(iter(arguments))]
    with pytest.raises(TypeError, match="missing"):
        OPS[op](**arguments)


def test_a_planned_copy_takes_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        hisparse.copy_cache_planned_mla(*planned_arguments().values())
