"""Every argument of every public op with every kind of wrong value: an exception that names it, and nothing changed.

The ops and their arguments come from the signatures, so that a new one is swept, or missed by
test_every_op_and_argument_is_swept. What each message says word by word is for test_errors.py and
test_kvcacheio_errors.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from places import torch
from right_calls import RIGHT_CALLS, Arguments, public_ops
from test_errors import huge, misaligned, overlapping, read_only, strided

ERRORS = (ValueError, TypeError, IndexError)
POOLS = ("src", "dst", "src_k", "dst_k", "src_v", "dst_v", "tensor", "host_cache", "device_buffer")
POOLS += ("host_cache_k", "host_cache_v", "device_buffer_k", "device_buffer_v")
WRITTEN = {"device_buffer_tokens", "lru_slots", "top_k_device_locs", *(pool for pool in POOLS if pool[0] == "d")}
PLAN = {"miss_src", "miss_dst", "miss_count"}  # written by the op that makes it
HUGE_IS_FINE = {"block_quota"}  # the device bounds it
EITHER_INDEX = {"req_pool_indices", "seq_lens", "mapping", "locations"}
ANY_LENGTH = {"num_real_reqs", "mapping", "locations", "tensor"}
STRIDES_ARE_FREE = {"locations"}

Change = Callable[[Any], Any]


def is_pool(name: str) -> bool:
    return name in POOLS


def is_written(op: str, name: str) -> bool:
    return name in WRITTEN or (name in PLAN and op.startswith("load"))


def may_be_none(op: str, name: str) -> bool:
    """A plan is given whole or not at all."""
    return inspect.signature(public_ops()[op]).parameters[name].default is None and name not in PLAN


def wrong_objects(optional: bool) -> Iterator[tuple[str, Change]]:
    for value in (7, 2.5, float("nan"), "text", b"bytes", [1, 2], {}, object(), np.int64(3), memoryview(b"12"), True):
        yield f"{type(value).__name__} {value!r:.6}", lambda _, value=value: value
    if not optional:
        yield "None", lambda _: None


def wrong_arrays(op: str, name: str, right: np.ndarray) -> Iterator[tuple[str, Change]]:
    yield from wrong_objects(may_be_none(op, name))
    if is_written(op, name):
        yield "read-only", read_only
    yield "objects", lambda a: a.astype(object)
    if right.size > 1:
        yield "every other element", strided if name not in STRIDES_ARE_FREE else lambda a: a.astype(np.float32)
        if right.shape[-1] > 1 and name not in STRIDES_ARE_FREE:
            yield "backwards", lambda a: np.flip(a, -1)
    yield "huge", huge
    if is_pool(name):
        if op != "get_device_accessible_ptr":
            yield "a byte", lambda a: a.reshape(-1).view(np.uint8)[:1]
        return
    for dtype in (
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
    ):
        if dtype != right.dtype.name and not (name in EITHER_INDEX and dtype in ("int32", "int64")):
            yield dtype, lambda a, dtype=dtype: a.astype(dtype)
    for dtype in ("float64", "complex64", "S4", "datetime64[s]", right.dtype.newbyteorder(">").str):
        yield dtype, lambda a, dtype=dtype: a.astype(dtype)
    yield "not a number", lambda a: np.full(a.shape, np.nan)
    yield "one more dimension", lambda a: a[None]
    yield "one dimension less", lambda a: a[0, ...]
    yield "no dimension", lambda a: np.array(1, a.dtype)
    yield "misaligned", misaligned
    if right.ndim == 2 and is_written(op, name):
        yield "rows that overlap", overlapping
    if right.ndim == 2 and name != "host_cache_locs":
        yield "no columns", lambda a: a[:, :0]
    if name not in ANY_LENGTH and right.ndim == 1:
        yield "one entry more", lambda a: np.concatenate([a, a[:1]])
        yield "no entry", lambda a: a[:0]


def wrong_integers(op: str, name: str) -> Iterator[tuple[str, Change]]:
    values: list[Any] = ["3", b"3", 1.5, float("nan"), float("inf"), True, [1], (1,), {}, 1j]
    values += [np.ones(1, np.int64), np.float32(2), np.bool_(True), object]
    values += [-1, -(2**31), -(2**63), -(2**70), 2**63, 2**70]
    values += [] if name in ("device_index", "layer_id") else [0]
    values += [] if name in HUGE_IS_FINE else [2**62, 2**63 - 1]
    for value in values:
        yield f"{type(value).__name__} {value!r:.24}", lambda _, value=value: value
    if not may_be_none(op, name):
        yield "None", lambda _: None


def wrong_flags() -> Iterator[tuple[str, Change]]:
    for value in (None, 2, -1, "yes", 1.0, float("nan"), [], np.ones(1, bool), 2**70):
        yield f"{type(value).__name__} {value!r:.12}", lambda _, value=value: value


def wrong_lists(op: str, name: str, right: list) -> Iterator[tuple[str, Change]]:
    for value in (None, 5, float("nan"), "text", b"b", {}, object(), iter([])):
        yield f"{type(value).__name__} {value!r:.6}", lambda _, value=value: value
    of_arrays = isinstance(right[0], np.ndarray)
    if of_arrays:
        yield "no list", lambda group: group[0]
        yield "empty", lambda _: []
        changes = wrong_arrays("copy_items", "dst" if name.startswith("dst") else "src", right[0])
    else:
        yield "one more", lambda group: [*group, 0]
        changes = wrong_integers("get_device_accessible_ptr", "device_index")
    for kind, change in changes:
        if kind == "a byte":
            continue  # a tensor of a list has no least size of its own
        yield f"{kind} in it", lambda group, change=change: [*group[:-1], change(group[-1])]


def wrong_values(op: str, name: str, right: Any) -> Iterator[tuple[str, Change]]:
    if isinstance(right, np.ndarray):
        return wrong_arrays(op, name, right)
    if isinstance(right, bool):
        return wrong_flags()
    if isinstance(right, list):
        return wrong_lists(op, name, right)
    return wrong_integers(op, name)


def wrong_tensors(op: str, name: str, right: Any) -> Iterator[tuple[str, Change]]:
    """Wrong values that only torch has."""
    if isinstance(right, list) and isinstance(right[0], np.ndarray):
        for kind, change in wrong_tensors(op, name, right[0]):
            yield f"{kind} in it", lambda group, change=change: [*group[:-1], change(group[-1])]
    if not isinstance(right, np.ndarray):
        return
    yield "meta", lambda a: torch.from_numpy(a).to("meta")
    yield "freed", freed
    if op != "get_device_accessible_ptr" and right.dtype != np.uint64:
        yield "sparse", lambda a: torch.from_numpy(a).to_sparse()
    if not is_pool(name) and right.dtype != np.uint64:
        yield "requires_grad", lambda a: torch.from_numpy(a).float().requires_grad_()
        yield "expanded", lambda a: torch.from_numpy(a).reshape(-1)[:1].expand(2, 3, 4)


def freed(array: np.ndarray):
    tensor = torch.from_numpy(array).clone()
    view = tensor.view(tensor.shape)
    tensor.untyped_storage().resize_(0)
    return view


ARGUMENTS = [(op, name) for op, right in RIGHT_CALLS.items() for name in right()]


def refuse(op: str, name: str, arguments: Arguments, wrong: Any) -> None:
    before = [pool.copy() for pool in arguments.pools]
    with pytest.raises(ERRORS) as raised:
        public_ops()[op](**{**arguments, name: wrong})
    assert raised.type in ERRORS
    assert all(map(np.array_equal, arguments.pools, before))
    message = str(raised.value)
    named, _, rest = message.partition(":")
    names = {part.partition("[")[0].strip() for part in named.split(",")}
    assert names <= set(arguments), message
    assert "expected " in rest and ", got " in rest, message
    # Where two arguments do not fit together, the other one may be named.
    short = name.removeprefix("src_").removeprefix("dst_")
    assert name in names or short in rest or "shape" in rest or "rows" in rest or "size" in rest, message


def sweep(op: str, name: str, values: Callable) -> None:
    failed = {}
    for kind, change in values(op, name, RIGHT_CALLS[op]()[name]):
        arguments = RIGHT_CALLS[op]()
        try:
            refuse(op, name, arguments, change(arguments[name]))
        except (Exception, pytest.fail.Exception) as error:
            failed[kind] = f"{type(error).__name__}: {error}"
    assert not failed


@pytest.mark.filterwarnings("ignore")  # of NumPy, about conversions that make no sense
@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_wrong_values(op, name):
    sweep(op, name, wrong_values)


@pytest.mark.skipif(torch is None, reason="torch is not installed")
@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_wrong_tensors(op, name):
    sweep(op, name, wrong_tensors)


def calls_for_a_gpu() -> Iterator[tuple[str, str]]:
    for op, name in ARGUMENTS:
        arrays = [value for value in RIGHT_CALLS[op]().values() if isinstance(value, (np.ndarray, list))]
        on_device = all(isinstance(value, np.ndarray) and value.dtype != np.uint64 for value in arrays)
        # Of the two tensors of embedding ranges, either may be on the host.
        others = ("get_device_accessible_ptr", "transfer_embedding_ranges_direct")
        if on_device and op not in others and isinstance(RIGHT_CALLS[op]()[name], np.ndarray):
            yield op, name


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name"), list(calls_for_a_gpu()))
def test_memory_that_the_gpu_does_not_reach(op, name):
    """One argument is an array of NumPy, a pageable tensor on the CPU, freed, or meta; the others are right."""
    right = RIGHT_CALLS[op]()
    tensors = {key: torch.from_numpy(value) for key, value in right.items() if isinstance(value, np.ndarray)}
    placed = Arguments(right)
    for key, tensor in tensors.items():
        placed[key] = tensor.pin_memory() if is_pool(key) and key.startswith(("src", "host")) else tensor.cuda()
    public_ops()[op](**placed)
    before = {key: placed[key].clone() for key in tensors}
    placed.pools = []
    gone = placed[name].clone()
    gone.untyped_storage().resize_(0)
    for wrong in (right[name], tensors[name], gone, placed[name].to("meta")):
        refuse(op, name, placed, wrong)
    torch.cuda.synchronize()
    assert all(torch.equal(placed[key], value) for key, value in before.items())


def test_every_argument_of_every_op_is_swept():
    expected = [(op, name) for op, function in public_ops().items() for name in inspect.signature(function).parameters]
    assert sorted(ARGUMENTS) == sorted(expected)
    kinds = [len(list(wrong_values(op, name, RIGHT_CALLS[op]()[name]))) for op, name in ARGUMENTS]
    assert min(kinds) >= 9 and sum(kinds) >= 4000
