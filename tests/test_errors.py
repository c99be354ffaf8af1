"""What a wrong argument gets: an error that names it, what was expected and what came, and nothing changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import hisparse

try:
    import torch
except ImportError:
    torch = None

B, K, H, PAGE, REQUESTS, TOKENS, ITEM = 3, 4, 8, 2, 5, 32, 16
OPS = {"swap_in": hisparse.load_cache_to_device_buffer_mla, "copy_items": hisparse.copy_items}


def swap_in_arguments() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    items = REQUESTS * (H + PAGE)
    return {
        "top_k_tokens": rng.permuted(np.tile(np.arange(30, dtype=np.int32), (B, 1)), axis=1)[:, :K].copy(),
        "device_buffer_tokens": np.full((REQUESTS, H + PAGE), -1, np.int32),
        "host_cache_locs": rng.permutation(REQUESTS * TOKENS).reshape(REQUESTS, TOKENS),
        "device_buffer_locs": rng.permutation(items).astype(np.int32).reshape(REQUESTS, H + PAGE),
        "host_cache": rng.integers(0, 256, (REQUESTS * TOKENS, ITEM), np.uint8),
        "device_buffer": rng.integers(0, 256, (items, ITEM), np.uint8),
        "top_k_device_locs": np.full((B, K), 77, np.int32),
        "req_pool_indices": np.array([3, 0, 4]),
        "seq_lens": np.full(B, TOKENS, np.int32),
        "lru_slots": np.tile(np.arange(H, dtype=np.int16), (REQUESTS, 1)),
        "item_size_bytes": ITEM,
        "num_top_k": K,
        "hot_buffer_size": H,
        "page_size": PAGE,
        "block_size": 64,
        "num_real_reqs": np.array([B], np.int32),
        "miss_src": np.full((B, K), 77, np.int64),
        "miss_dst": np.full((B, K), 77, np.int32),
        "miss_count": np.full(B, 77, np.int32),
        "skip_io": False,
        "blocks_per_request": None,
    }


def copy_items_arguments() -> dict[str, Any]:
    rng = np.random.default_rng(8)
    return {
        "src": rng.integers(0, 256, (20, ITEM), np.uint8),
        "dst": rng.integers(0, 256, (20, ITEM), np.uint8),
        "src_indices": np.arange(6),
        "dst_indices": np.arange(6)[::-1].copy(),
        "item_size_bytes": ITEM,
        "blocks": None,
    }


ARGUMENTS = {"swap_in": swap_in_arguments, "copy_items": copy_items_arguments}
POOLS = ("host_cache", "device_buffer", "src", "dst")
VECTORS = ("req_pool_indices", "seq_lens", "num_real_reqs", "miss_count", "src_indices", "dst_indices")
OPTIONAL = ("num_real_reqs", "miss_src", "miss_dst", "miss_count", "blocks_per_request", "blocks")
EITHER_INDEX = ("req_pool_indices", "seq_lens")
WRITTEN_TABLES = ("device_buffer_tokens", "top_k_device_locs", "lru_slots", "miss_src", "miss_dst")
WRITTEN = (*WRITTEN_TABLES, "miss_count", "device_buffer", "dst")
LEAST_COLUMNS = {
    "top_k_tokens": K,
    "top_k_device_locs": K,
    "device_buffer_tokens": H + PAGE,
    "device_buffer_locs": H + PAGE,
    "lru_slots": H,
    "miss_src": K,
    "miss_dst": K,
}
PER_ROW = ("top_k_device_locs", "req_pool_indices", "seq_lens", "miss_src", "miss_dst", "miss_count")
SIZES = ("item_size_bytes", "num_top_k", "hot_buffer_size", "page_size", "block_size", "blocks_per_request", "blocks")


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
        return f"{self.argument}-{self.kind}"


def strided(array: np.ndarray) -> np.ndarray:
    """The same values, every second element of the last dimension of a larger array."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


def overlapping(array: np.ndarray) -> np.ndarray:
    step = array.itemsize
    return np.lib.stride_tricks.as_strided(array.copy(), array.shape, (step, step))


def misaligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1, np.uint8)
    moved = np.ndarray(array.shape, array.dtype, buffer=raw, offset=1)
    moved[...] = array
    return moved


class Huge(np.ndarray):
    """An array that says it has 2**62 rows."""

    @property
    def __array_interface__(self):
        told = super().__array_interface__
        return told | {"shape": (1 << 62, *self.shape[1:]), "strides": self.strides}


def huge(array: np.ndarray) -> np.ndarray:
    return array.view(Huge)


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def class_name(value) -> str:
    return "" if isinstance(value, np.ndarray) else type(value).__name__  # an array may be passed as a tensor


def wrong_tensors():
    for op, make in ARGUMENTS.items():
        for name, value in make().items():
            if not isinstance(value, np.ndarray):
                continue

            def wrong(kind, change, error, expected="", got="", op=op, name=name):
                return Wrong(op, name, kind, change, error, expected, got)

            tensor = "torch.Tensor or numpy.ndarray"
            for what in ([1, 2], 5, 2.5, "text", b"bytes", float("nan"), np.int32(3), memoryview(b"12")):
                kind = type(what).__name__
                yield wrong(f"{kind}-{what!r:.9}", lambda _, what=what: what, TypeError, tensor, kind)
            if name not in OPTIONAL:
                yield wrong("None", lambda _: None, TypeError, tensor, "NoneType")
            if name in WRITTEN:
                yield wrong("read-only", read_only, ValueError, "writable", "read-only")
            if name in POOLS:
                yield wrong("transposed", lambda a: a.T, ValueError, "row-major", str(value.T.shape))
                yield wrong("strided", strided, ValueError, "row-major", "strides")
                yield wrong("padded", lambda a: np.repeat(a, 2, 1)[:, :ITEM], ValueError, "row-major", "strides")
                yield wrong("too-small", lambda a: a.reshape(-1)[: ITEM - 1], ValueError, "one item", "15 bytes")
                yield wrong("huge", huge, ValueError, "", str(1 << 62))
                continue
            wanted = "int32 or int64" if name in EITHER_INDEX else value.dtype.name
            for dtype in ("int8", "int16", "int32", "int64", "uint32", "float32", "float64", "bool", "complex64"):
                if dtype not in wanted:
                    yield wrong(dtype, lambda a, dtype=dtype: a.astype(dtype), TypeError, wanted, dtype)
            yield wrong("big-endian", lambda a: a.astype(a.dtype.newbyteorder(">")), TypeError, wanted, ">i")
            yield wrong("rank+1", lambda a: a[None], ValueError, "[", str(value[None].shape))
            yield wrong("rank-1", lambda a: a[0, ...], ValueError, "[", str(value[0].shape))
            yield wrong("misaligned", misaligned, ValueError, "aligned", "address")
            if value.shape[-1] > 1:
                yield wrong("strided", strided, ValueError, "contiguous", "strides")
                yield wrong("reversed", lambda a: np.flip(a, -1), ValueError, "contiguous", "strides")
            if name in WRITTEN_TABLES:
                yield wrong("overlapping", overlapping, ValueError, "overlap", "strides")
            if name in LEAST_COLUMNS:
                least = LEAST_COLUMNS[name]
                narrow = (len(value), least - 1)
                yield wrong("narrow", lambda a, n=least: a[:, : n - 1], ValueError, f"= {least}]", str(narrow))
            if name in PER_ROW:
                yield wrong("too-short", lambda a: a[:-1], ValueError, f"[{B}", str(value[:-1].shape))
                longer = (B + 1, *value.shape[1:])
                yield wrong("too-long", lambda a: np.concatenate([a, a[:1]]), ValueError, f"[{B}", str(longer))
            elif name not in VECTORS and name != "top_k_tokens":
                yield wrong("huge", huge, ValueError, "memory", str(1 << 62))


def wrong_numbers():
    for op, make in ARGUMENTS.items():
        for name in make():
            if name not in SIZES:
                continue
            for what in ("4", 1.5, float("nan"), True, [1], np.ones(1, np.int32), np.float32(2), b"1"):
                yield Wrong(op, name, f"{what!r:.12}", lambda _, v=what: v, TypeError, "an int", class_name(what))
            if name not in OPTIONAL:
                yield Wrong(op, name, "None", lambda _: None, TypeError, "an int", "NoneType")
            for number in (0, -1, -(1 << 63)):
                expected = "1 to " if name in ("item_size_bytes", *OPTIONAL) else "at least 1"
                yield Wrong(op, name, str(number), lambda _, n=number: n, ValueError, expected, str(number))
            yield Wrong(op, name, "-2**70", lambda _: -(1 << 70), ValueError, "1", "less than -2**63")
            yield Wrong(op, name, "2**70", lambda _: 1 << 70, ValueError, "1", "2**63 or more")


def other_wrong_values():
    def swap_in(argument, what, error, expected, got, named=None):
        """`what` is a value, or a function of the right one."""
        kind = getattr(what, "__name__", f"{what!r:.12}")
        change = what if callable(what) else lambda _: what
        return Wrong("swap_in", argument, kind, change, error, expected, got, named)

    def shorter(array):
        return array[:-1]

    def empty(array):
        return array[:0]

    def wider(array):
        return np.zeros((len(array), array.shape[1] + 1), array.dtype)

    pool = REQUESTS * TOKENS * ITEM
    slots = H + PAGE
    yield swap_in("item_size_bytes", 1 << 40, ValueError, f"1 to {2**30}", str(1 << 40))
    yield swap_in("item_size_bytes", pool + 1, ValueError, f"item_size_bytes = {pool + 1}", str(pool), "host_cache")
    yield swap_in("num_top_k", H + 1, ValueError, f"num_top_k = {H + 1}", str(H), "hot_buffer_size")
    yield swap_in("num_top_k", K + 1, ValueError, f"= {K + 1}]", f"({B}, {K})", "top_k_tokens")
    yield swap_in("hot_buffer_size", K - 1, ValueError, f"num_top_k = {K}", str(K - 1))
    yield swap_in("hot_buffer_size", 32769, ValueError, "at most 32768", "32769")
    yield swap_in("hot_buffer_size", H + 1, ValueError, f"= {slots + 1}]", f"(5, {slots})", "device_buffer_tokens")
    for size in (PAGE + 1, (1 << 63) - 1):
        yield swap_in("page_size", size, ValueError, "page_size", f"(5, {slots})", "device_buffer_tokens")
    for size in (1, 63, 65, 1000):
        yield swap_in("block_size", size, ValueError, "multiple of the warp size, 64", str(size))
    for size in (1088, 1 << 40):
        yield swap_in("block_size", size, ValueError, "at most 1024", str(size))
    yield swap_in("blocks_per_request", 65, ValueError, "1 to 64", "65")
    for what in ("yes", None, 1.0, np.zeros(1, np.int32)):
        yield swap_in("skip_io", what, TypeError, "a bool", class_name(what))
    yield swap_in("skip_io", 2, ValueError, "0 to 1", "2")

    for name in ("miss_src", "miss_dst", "miss_count"):
        yield swap_in(name, None, ValueError, "all given", "None")
    yield swap_in("miss_dst", wider, ValueError, "row stride of miss_src", str(K + 1))
    yield swap_in("miss_src", wider, ValueError, "row stride of miss_src", str(K), "miss_dst")
    yield swap_in("device_buffer_locs", wider, ValueError, "row stride of device_buffer_tokens", str(slots + 1))
    yield swap_in("device_buffer_tokens", wider, ValueError, "row stride", str(slots), "device_buffer_locs")
    yield swap_in("num_real_reqs", empty, ValueError, "at least 1", "(0,)")
    # The number of rows is that of top_k_tokens: where it differs, the first other tensor is to blame.
    yield swap_in("top_k_tokens", shorter, ValueError, f"[{B - 1}", f"({B}, {K})", "top_k_device_locs")
    yield Wrong("copy_items", "dst_indices", "shorter", shorter, ValueError, "[6]", "(5,)")
    yield Wrong("copy_items", "src_indices", "shorter", shorter, ValueError, "[5]", "(6,)", "dst_indices")
    yield Wrong("copy_items", "blocks", "65536", lambda _: 65536, ValueError, "1 to 65535", "65536")


CASES = [*wrong_tensors(), *wrong_numbers(), *other_wrong_values()]


def as_library(value, library: str):
    """A NumPy array as the library's own, with the same memory and strides; or a skip where it has no such thing."""
    if library == "numpy" or not isinstance(value, np.ndarray):
        return value
    if any(n < 0 for n in value.strides) or not value.dtype.isnative or not value.flags.writeable:
        pytest.skip("torch has no such tensor")
    if isinstance(value, Huge) or (value.dtype == np.uint32 and not hasattr(torch, "uint32")):
        pytest.skip("torch has no such tensor")
    try:
        tensor = torch.from_numpy(value)
    except (TypeError, ValueError):
        pytest.skip("torch has no such tensor")
    return tensor if library == "torch" else tensor.as_subclass(AttributeTensor)


if torch is not None:

    class AttributeTensor(torch.Tensor):
        """A tensor as torch had them before the DLPack exchange API."""

        __dlpack_c_exchange_api__ = None


@pytest.fixture(params=["numpy", "torch", "torch-attributes"])
def library(request):
    if request.param != "numpy" and torch is None:
        pytest.skip("torch is not installed")
    return request.param


def content(arguments: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in arguments.items() if isinstance(value, np.ndarray)}


def refused(op: str, arrays: dict[str, Any], given: dict[str, Any], error: type[Exception]) -> str:
    before = content(arrays)
    with pytest.raises(error) as raised:
        OPS[op](**given)
    assert raised.type is error
    assert content(arrays) == before
    return str(raised.value)


@pytest.mark.parametrize("wrong", CASES, ids=str)
def test_wrong_arguments(library, wrong):
    arrays = ARGUMENTS[wrong.op]()
    given = {name: as_library(value, library) for name, value in arrays.items()}
    given[wrong.argument] = as_library(wrong.change(arrays[wrong.argument]), library)
    message = refused(wrong.op, arrays, given, wrong.error)
    head, _, got = message.partition(", got ")
    name, _, expected = head.partition(": ")
    assert name == (wrong.named or wrong.argument)
    assert "expected " in expected and wrong.expected in expected, message
    assert got and wrong.got in got, message


def test_every_argument_is_covered():
    for op, make in ARGUMENTS.items():
        covered = {wrong.argument for wrong in CASES if wrong.op == op}
        assert covered == set(make())
    assert len({(wrong.op, str(wrong)) for wrong in CASES}) == len(CASES)


@pytest.mark.parametrize("op", OPS)
def test_the_right_arguments_pass(library, op):
    arrays = ARGUMENTS[op]()
    OPS[op](**{name: as_library(value, library) for name, value in arrays.items()})
    if op == "swap_in":
        assert arrays["miss_count"].tolist() == [K] * B
        for rid, output, tokens in zip(
            arrays["req_pool_indices"], arrays["top_k_device_locs"], arrays["top_k_tokens"], strict=True
        ):
            source = arrays["host_cache"][arrays["host_cache_locs"][rid, tokens]]
            assert np.array_equal(arrays["device_buffer"][output], source)
    else:
        assert np.array_equal(arrays["dst"][:6], arrays["src"][:6][::-1])


@pytest.mark.parametrize("op", OPS)
def test_an_empty_batch_is_checked_too(library, op):
    arrays = ARGUMENTS[op]()
    for name in (*PER_ROW, "top_k_tokens", "src_indices", "dst_indices"):
        if name in arrays:
            arrays[name] = arrays[name][:0]
    given = {name: as_library(value, library) for name, value in arrays.items()}
    before = content(arrays)
    OPS[op](**given)
    assert content(arrays) == before
    assert "item_size_bytes: expected 1 to" in refused(op, arrays, given | {"item_size_bytes": 0}, ValueError)
    if op == "swap_in":
        assert "block_size" in refused(op, arrays, given | {"block_size": 1000}, ValueError)


def test_shared_memory_that_is_too_small(library):
    arrays = swap_in_arguments()
    given = {name: as_library(value, library) for name, value in arrays.items()}
    with hisparse.cpu.options(shared_memory_bytes=300):
        message = refused("swap_in", arrays, given, ValueError)
    assert message.startswith("num_top_k, hot_buffer_size: expected ") and " 300 bytes" in message
    assert message.endswith(" bytes") and "got 4 and 8, which need " in message


needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


def wrong_torch_tensors():
    yield "seq_lens", "sparse", lambda t: t.to_sparse(), TypeError, "dense"
    yield "seq_lens", "meta", lambda t: t.to("meta"), TypeError, "CPU, CUDA or ROCm"
    yield "device_buffer", "quantized-away", lambda t: t.float().to_mkldnn(), TypeError, "dense"
    yield "host_cache", "conjugated", lambda t: t.to(torch.complex64).conj(), ValueError, "resolve_conj"
    yield "host_cache", "negated", lambda t: t.to(torch.complex64).conj().imag, ValueError, "resolve_neg"
    yield "device_buffer_tokens", "expanded", lambda t: t[:1].expand(REQUESTS, -1), ValueError, "overlap"
    for name, value in swap_in_arguments().items():
        if isinstance(value, np.ndarray):
            yield name, "freed", freed, ValueError, "storage"


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@needs_torch
@pytest.mark.parametrize(
    ("name", "change", "error", "expected"),
    [pytest.param(name, *rest, id=f"{name}-{kind}") for name, kind, *rest in wrong_torch_tensors()],
)
@pytest.mark.parametrize("tensors", ["torch", "torch-attributes"])
def test_wrong_torch_tensors(tensors, name, change, error, expected):
    arrays = swap_in_arguments()
    given = {key: as_library(value, tensors) for key, value in arrays.items()}
    given[name] = change(torch.from_numpy(arrays[name]))
    if tensors == "torch-attributes" and error is ValueError:
        given[name] = given[name].as_subclass(AttributeTensor)
    message = refused("swap_in", arrays, given, error)
    assert message.startswith(f"{name}: expected ") and expected in message and ", got " in message


@needs_torch
@pytest.mark.filterwarnings("ignore")  # of torch, about dtypes that it regrets
@pytest.mark.parametrize("tensors", ["torch", "torch-attributes"])
def test_pools_of_any_dtype(tensors):
    dtypes = [t for t in vars(torch).values() if isinstance(t, torch.dtype)]
    copied = 0
    for dtype in dtypes:
        try:
            pools = [torch.empty(64, dtype=dtype).view(torch.uint8).random_().view(dtype) for _ in range(2)]
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # a dtype that torch itself can't look at as bytes
        raws = [pool.view(torch.uint8) for pool in pools]
        if tensors == "torch-attributes":
            pools = [pool.as_subclass(AttributeTensor) for pool in pools]
        hisparse.copy_items(*pools, torch.tensor([1, 3]), torch.tensor([0, 2]), 8)
        items = [raw.reshape(-1, 8) for raw in raws]
        assert torch.equal(items[1][[0, 2]], items[0][[1, 3]]), dtype
        copied += 1
    assert copied >= 20


@needs_torch
def test_parameters_are_pools_too():
    source = torch.nn.Parameter(torch.rand(8, 4))
    target = torch.zeros(8, 4, requires_grad=True)
    hisparse.copy_items(source, target, torch.tensor([5]), torch.tensor([1]), 16)
    assert torch.equal(target[1], source[5]) and not target[0].any()


def test_numpy_pools_of_any_dtype():
    record = [("key", "i4"), ("value", "f8", 3)]
    for dtype in ("bool", "float16", "complex128", "S5", "U3", ">f8", "datetime64[s]", record):
        source, target = np.zeros(6, dtype), np.zeros(6, dtype)
        source.view(np.uint8)[:] = np.arange(source.nbytes) % 2
        hisparse.copy_items(source, target, np.array([2]), np.array([4]), source.itemsize)
        assert target[4].tobytes() == source[2].tobytes() and not target[:4].view(np.uint8).any()


def test_numpy_integers_are_ints():
    arguments = swap_in_arguments()
    for name in SIZES:
        if isinstance(arguments.get(name), int):
            arguments[name] = np.int64(arguments[name])
    hisparse.load_cache_to_device_buffer_mla(**arguments)
    assert arguments["miss_count"].tolist() == [K] * B


@pytest.mark.parametrize("op", OPS)
def test_arguments_that_the_functions_do_not_have(op):
    arguments = ARGUMENTS[op]()
    with pytest.raises(TypeError, match="pool_size"):
        OPS[op](**arguments, pool_size=3)
    del arguments["item_size_bytes"]
    with pytest.raises(TypeError, match="item_size_bytes"):
        OPS[op](**arguments)
