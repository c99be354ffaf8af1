"""The check of contents: every fault is found and named, a valid call passes, and a refused one changes nothing."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from family_cases import block_case, check_blocks, check_dsv4, dsv4_case
from places import assert_same, call
from swap_in_cases import Row, check, make_case, random_row, run

import hisparse
from hisparse import kvcacheio

HOT, NUM_TOP_K, ITEM, LENGTH, MAX_TOKENS = 40, 24, 20, 90, 100


def make(rng, *, rows=4, real=None, **others):
    """Valid rows, of which the last is short; without what random_row scatters beyond the sequence."""
    cases = []
    for _ in range(rows - 1):
        resident = rng.permutation(LENGTH - 1)[:HOT].astype(np.int64)
        resident[rng.permutation(HOT)[:5]] = -1
        asked = rng.permutation(LENGTH)[:NUM_TOP_K]
        asked[rng.integers(NUM_TOP_K)] = -1
        cases.append(Row(LENGTH, asked, resident))
    cases.append(Row(17, rng.integers(-1, 17, NUM_TOP_K), rng.integers(-(2**31), 2**31, HOT)))
    sizes = {"num_top_k": NUM_TOP_K, "hot_buffer_size": HOT, "item_size_bytes": ITEM, "max_tokens": MAX_TOKENS}
    return make_case(rng, cases, num_real_reqs=real, **sizes, **others)


def refused(place, case, function=hisparse.load_cache_to_device_buffer_mla, **options) -> hisparse.ContentError:
    before = {name: array.copy() for name, array in case.arrays.items()}
    found = []

    def op(**arguments):
        with pytest.raises(hisparse.ContentError) as raised, hisparse.checking():
            function(**arguments)
        found.append(raised.value)

    after = call(place, op, case.arrays, **case.sizes, **options)
    assert_same(after, before)
    (error,) = found
    assert isinstance(error, ValueError) and str(error).startswith(f"{error.argument}: expected ")
    return error


@pytest.mark.parametrize("options", [{}, {"skip_io": True}, {"blocks_per_request": 3}])
def test_a_valid_call_is_as_without_the_check(place, rng, options):
    with hisparse.checking():
        check(place, make(rng), **options)
        check(place, make(rng, rows=6, real=3), **options)
        check(place, make(rng, real=0), **options)
        check(place, make(rng, real=-5), **options)


def test_what_a_short_row_does_not_use_is_no_fault(place, rng):
    case = make(rng)
    rid = case["req_pool_indices"][3]
    case["device_buffer_locs"][rid, 17:], case["host_cache_locs"][rid], case["lru_slots"][rid] = -7, -7, -7
    with hisparse.checking():
        after = run(place, case)
    asked = case["top_k_tokens"][3, :NUM_TOP_K]
    expected = np.where(asked < 0, -1, case["device_buffer_locs"][rid, asked])
    assert np.array_equal(after["top_k_device_locs"][3, :NUM_TOP_K], expected)


@pytest.mark.parametrize("hot", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("max_tokens", [1001, 200_000])
def test_valid_states_of_many_sizes(cpu_place, rng, hot, max_tokens):
    length = 1001 if max_tokens == 1001 else 150_000
    rows = [
        Row(length, rng.permutation(length)[: min(hot, 20)], rng.permutation(length - 1)[:hot].astype(np.int64))
        for _ in range(2)
    ]
    case = make_case(
        rng, rows, num_top_k=min(hot, 20), hot_buffer_size=hot, item_size_bytes=4, max_tokens=max_tokens, host_rows=1009
    )
    with hisparse.checking():
        check(cpu_place, case)


@pytest.mark.parametrize("rid", [-1, "rows", 2**31 - 1])
def test_a_request_outside_the_tables(place, rng, rid):
    case = make(rng)
    rows = min(len(case[name]) for name in ("device_buffer_tokens", "host_cache_locs", "lru_slots"))
    case["req_pool_indices"][2] = rows if rid == "rows" else rid
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("req_pool_indices", 2, None)
    assert f"0 to {rows - 1}" in str(error) and f"got {case['req_pool_indices'][2]} at [2]" in str(error)


def test_two_rows_of_one_request(place, rng):
    case = make(rng)
    case["req_pool_indices"][2] = case["req_pool_indices"][1]
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("req_pool_indices", 1, None)
    assert f"got {case['req_pool_indices'][1]} at [1] and [2]" in str(error)


def test_a_padded_row_may_have_any_request(place, rng):
    case = make(rng, rows=5, real=4)
    case["req_pool_indices"][4] = case["req_pool_indices"][0]
    with hisparse.checking():
        check(place, case)


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("token", [-2, -(2**31), "length", 2**31 - 1])
def test_a_token_outside_the_sequence(place, rng, b, token):
    case = make(rng)
    case["top_k_tokens"][b, 9] = case["seq_lens"][b] if token == "length" else token
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("top_k_tokens", b, 9)
    assert f"0 to {case['seq_lens'][b] - 1}, got {case['top_k_tokens'][b, 9]} at [{b}, 9]" in str(error)


def test_a_token_without_a_host_loc(place, rng):
    case = make(rng)
    columns = case["host_cache_locs"].shape[1]
    case["seq_lens"][1] = 120
    case["top_k_tokens"][1, 5], case["top_k_tokens"][1, 7] = 119, columns  # the newest needs none
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("top_k_tokens", 1, 7)
    assert f"host_cache_locs, 0 to {columns - 1}, got {columns} at [1, 7]" in str(error)


@pytest.mark.parametrize("loc", [-1, "rows", 2**31 - 1])
@pytest.mark.parametrize(("b", "slot"), [(0, 0), (1, HOT), (2, HOT - 1), (3, 16)])
def test_a_device_loc_outside_the_pool(place, rng, loc, b, slot):
    case = make(rng)
    rid = case["req_pool_indices"][b]
    case["device_buffer_locs"][rid, slot] = len(case["device_buffer"]) if loc == "rows" else loc
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("device_buffer_locs", rid, slot)
    assert f"got {case['device_buffer_locs'][rid, slot]} at [{rid}, {slot}] (row {b} of the batch)" in str(error)


@pytest.mark.parametrize("loc", [-1, -(2**40), "rows", 2**40])
def test_a_host_loc_outside_the_pool(place, rng, loc):
    case = make(rng)
    rid, token = case["req_pool_indices"][1], next(t for t in case["top_k_tokens"][1] if 0 <= t < LENGTH - 1)
    case["host_cache_locs"][rid, token] = len(case["host_cache"]) if loc == "rows" else loc
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("host_cache_locs", rid, token)
    assert f"got {case['host_cache_locs'][rid, token]} at [{rid}, {token}]" in str(error)


@pytest.mark.parametrize("token", [-2, 0x7F7F7F7F, "columns"])
def test_a_slot_that_holds_no_token(place, rng, token):
    """F35: what was never initialised."""
    case = make(rng)
    rid = case["req_pool_indices"][2]
    case["device_buffer_tokens"][rid, 30] = case["host_cache_locs"].shape[1] if token == "columns" else token
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("device_buffer_tokens", rid, 30)


@pytest.mark.parametrize("slots", [(0, 1), (7, HOT - 1)])
def test_a_token_in_two_slots(place, rng, slots):
    case = make(rng)
    rid = case["req_pool_indices"][1]
    absent = np.setdiff1d(np.arange(LENGTH - 1), case.tokens(1))[0]
    case["device_buffer_tokens"][rid, list(slots)] = absent
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("device_buffer_tokens", rid, slots[0])
    assert f"got {absent} at [{rid}, {slots[0]}] and [{rid}, {slots[1]}]" in str(error)


@pytest.mark.parametrize("token", [0, 131_071, 131_072, 140_000, 199_999])
def test_a_token_in_two_slots_beyond_the_first_bitmap(cpu_place, rng, token):
    row = Row(200_001, [-1], np.arange(1, 41) * 2)
    case = make_case(rng, [row], num_top_k=1, hot_buffer_size=40, item_size_bytes=4, max_tokens=200_002, host_rows=9)
    case["device_buffer_tokens"][case["req_pool_indices"][0], [3, 39]] = token
    error = refused(cpu_place, case)
    assert (error.argument, error.column) == ("device_buffer_tokens", 3)


@pytest.mark.parametrize("kind", ["outside", "negative", "repeated"])
def test_a_broken_lru_row(place, rng, kind):
    case = make(rng)
    rid = case["req_pool_indices"][0]
    row = case["lru_slots"][rid]
    row[33] = {"outside": HOT, "negative": -1, "repeated": row[5]}[kind]
    error = refused(place, case)
    assert (error.argument, error.row, error.column) == ("lru_slots", rid, 5 if kind == "repeated" else 33)
    assert f"a permutation of 0 to {HOT - 1}" in str(error)
    assert ("and [" in str(error)) == (kind == "repeated")


def test_the_first_fault_in_row_and_column_is_reported(place, rng):
    case = make(rng)
    case["top_k_tokens"][1:3, [20, 4, 11]] = -5
    error = refused(place, case)
    assert (error.row, error.column) == (1, 4)


def test_little_shared_memory_takes_more_rounds(rng):
    row = Row(200_001, [-1], np.arange(1, 41) * 2)
    case = make_case(rng, [row], num_top_k=1, hot_buffer_size=40, item_size_bytes=4, max_tokens=200_002, host_rows=9)
    case["device_buffer_tokens"][case["req_pool_indices"][0], [3, 39]] = 140_001
    refusal = pytest.raises(hisparse.ContentError, match="device_buffer_tokens: .* got 140001")
    with hisparse.cpu.options(shared_memory_bytes=1 << 14), hisparse.checking(), refusal:
        hisparse.load_cache_to_device_buffer_mla(**case.views(), **case.sizes)


# The other swap-ins


def test_pages_of_deepseek_v4(place, rng):
    resident = rng.permutation(LENGTH - 1)[:HOT].astype(np.int64)
    row = Row(LENGTH, rng.permutation(LENGTH)[:NUM_TOP_K], resident)
    case = dsv4_case(rng, [row], num_top_k=NUM_TOP_K, hot_buffer_size=HOT, max_tokens=MAX_TOKENS)
    with hisparse.checking():
        check_dsv4(place, case)
    function = hisparse.load_cache_to_device_buffer_dsv4_mla
    rid, token = case["req_pool_indices"][0], next(t for t in row.top_k if t < LENGTH - 1)
    rows = len(case["host_cache"]) * 64
    case["host_cache_locs"][rid, token] = rows
    error = refused(place, case, function)
    assert (error.argument, error.row, error.column) == ("host_cache_locs", rid, token)
    assert f"0 to {rows - 1}, " in str(error)
    case["host_cache_locs"][rid, token] = rows - 1
    case["device_buffer_tokens"][rid, [2, 9]] = 3
    assert refused(place, case, function).argument == "device_buffer_tokens"


def test_blocks_with_keys_and_values(place, rng):
    def make_blocks():
        resident = rng.permutation(LENGTH - 1)[:HOT].astype(np.int64)
        # The last block reaches past the end of the sequence.
        return block_case(rng, [(LENGTH, [22, 3, -1, 7, 0], resident)], 4, HOT)

    function = hisparse.load_blocks_to_device_buffer_mha
    with hisparse.checking():
        check_blocks(place, make_blocks())

    case = make_blocks()
    rid = case["req_pool_indices"][0]
    case["host_cache_locs"][rid, 30] = -1  # token 30 is in block 7
    error = refused(place, case, function)
    assert (error.argument, error.row, error.column) == ("host_cache_locs", rid, 30)

    case = make_blocks()
    columns = case["host_cache_locs"].shape[1]
    case["seq_lens"][0] = columns + 9
    case["top_k_blocks"][0, [0, 2]] = 1, (columns + 3) // 4  # the sequence no longer ends within the first block
    error = refused(place, case, function)
    assert (error.argument, error.row, error.column) == ("top_k_blocks", 0, 2)

    case = make_blocks()
    rid = case["req_pool_indices"][0]
    case["lru_slots"][rid, 4] = case["lru_slots"][rid, 11]
    error = refused(place, case, function)
    assert (error.argument, error.row, error.column) == ("lru_slots", rid, 4)


# When it runs


def test_off_by_default_and_outside_of_the_block(cpu_place, rng):
    case = make(rng)
    case["top_k_tokens"][0, 0] = -5
    run(cpu_place, case)
    with hisparse.checking(), hisparse.checking():
        pass
    run(cpu_place, case)
    with pytest.raises(KeyError), hisparse.checking():
        raise KeyError
    run(cpu_place, case)
    with hisparse.checking():
        with hisparse.checking():
            pass
        refused(cpu_place, case)


def test_it_holds_for_every_thread(cpu_place, rng):
    case = make(rng)
    case["top_k_tokens"][0, 0] = -5
    errors = []

    def work():
        try:
            run(cpu_place, case)
        except hisparse.ContentError as error:
            errors.append(error)

    with hisparse.checking():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize(("value", "outcome"), [("1", "checked"), ("0", "taken"), ("", "taken"), ("yes", "ValueError")])
def test_environment(value, outcome):
    script = """
import numpy as np, hisparse
try:
    hisparse.copy_items(np.ones((4, 8), np.uint8), np.ones((4, 8), np.uint8), np.array([4]), np.array([0]), 8)
    print("taken")
except hisparse.ContentError:
    print("checked")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HISPARSE_CHECK": value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert outcome in (done.stdout.strip() or done.stderr), done.stderr
    assert "HISPARSE_CHECK" in done.stderr or outcome != "ValueError"


def test_the_error_survives_pickling_and_copying():
    error = hisparse.ContentError("lru_slots: expected ...", "lru_slots", 3, 5)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(other), other.argument, other.row, other.column) == (str(error), "lru_slots", 3, 5)


# Indices of copies


def pools(rows=10):
    return np.arange(rows * 16, dtype=np.uint8).reshape(rows, 16), np.zeros((rows + 2, 16), np.uint8)


TRANSFERS = {
    "copy_items": lambda s, d, i, j: hisparse.copy_items(s, d, i, j, 16),
    "transfer_kv_per_layer_mla": lambda s, d, i, j: kvcacheio.transfer_kv_per_layer_mla(s, d, i, j, 16),
    "transfer_kv_per_layer": lambda s, d, i, j: kvcacheio.transfer_kv_per_layer(s, d, s.copy(), d.copy(), i, j, 16),
}


@pytest.mark.parametrize("op", TRANSFERS)
@pytest.mark.parametrize("count", [4, 5000])
@pytest.mark.parametrize(("side", "value"), [(0, 10), (1, 12), (0, 2**62), (1, 2**62)])
def test_an_index_past_the_pool(cpu_place, op, count, side, value):
    src, dst = pools()
    indices = [np.arange(count) % 10, np.arange(count) % 12]
    indices[side][-2] = value
    with cpu_place.options(), hisparse.checking(), pytest.raises(hisparse.ContentError) as raised:
        TRANSFERS[op](src, dst, *indices)
    name, rows = ("src_indices", 10) if side == 0 else ("dst_indices", 12)
    assert (raised.value.argument, raised.value.row, raised.value.column) == (name, count - 2, None)
    assert f"less than {rows}" in str(raised.value) and f"got {value} at [{count - 2}]" in str(raised.value)
    assert not dst.any()


@pytest.mark.parametrize("op", TRANSFERS)
def test_negative_indices_are_no_fault(cpu_place, op):
    src, dst = pools()
    with cpu_place.options(), hisparse.checking():
        TRANSFERS[op](src, dst, np.array([3, -1, 4]), np.array([0, 1, -(2**60)]))
    assert (dst[0] == src[3]).all() or op == "transfer_kv_per_layer"
    assert not dst[1:].any()


@pytest.mark.gpu
def test_a_captured_call_is_refused(rng):
    import torch
    from places import make_place

    place, case = make_place("gpu"), make(rng)

    def op(**arguments):
        hisparse.load_cache_to_device_buffer_mla(**arguments)  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="graph cannot capture"), hisparse.checking():
            hisparse.load_cache_to_device_buffer_mla(**arguments)

    call(place, op, case.arrays, **case.sizes)


def test_random_valid_states_pass(cpu_place, rng):
    """Rows as other tests make them, but for tokens past the sequence."""
    for _ in range(20):
        rows = [random_row(rng, int(rng.integers(1, 120)), NUM_TOP_K, HOT, noise=0) for _ in range(3)]
        for row in rows:
            if row.seq_len > HOT:
                row.resident[row.resident >= row.seq_len] = -1
            row.top_k = np.where((row.top_k < -1) | (row.top_k >= row.seq_len), -1, row.top_k)
        case = make_case(rng, rows, num_top_k=NUM_TOP_K, hot_buffer_size=HOT, item_size_bytes=ITEM)
        with hisparse.checking():
            check(cpu_place, case)
