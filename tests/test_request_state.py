"""reset_request_state: empty hot buffers for the requests that are named, and for no others."""

from __future__ import annotations

import numpy as np
import pytest
from places import Guarded, assert_same, call
from swap_in_cases import Row, check, make_case

import hisparse

try:
    import torch
except ImportError:
    torch = None

REQUESTS, WIDTH, HOT = 5, 12, 8


def tables(rng):
    return {
        "device_buffer_tokens": Guarded.random(rng, np.int32, (REQUESTS, WIDTH), WIDTH + 3, 4),
        "lru_slots": Guarded.random(rng, np.int16, (REQUESTS + 1, HOT), HOT + 1, 2),
    }


def expected(arrays, rows, slots):
    arrays = {name: array.copy() for name, array in arrays.items()}
    for row in rows:
        arrays["device_buffer_tokens"].view[row] = -1
        for slot in range(slots):
            arrays["lru_slots"].view[row, slot] = slot
    return arrays


@pytest.mark.parametrize(
    ("requests", "rows"),
    [(2, [2]), (np.int64(4), [4]), ([3, 0], [0, 3]), ((1,), [1]), ([], []), (range(4), range(4)), ([1, 1], [1])],
)
@pytest.mark.parametrize("slots", [None, 6])
def test_the_named_rows(place, rng, requests, rows, slots):
    arrays = tables(rng)
    after = call(place, hisparse.reset_request_state, arrays, requests=requests, hot_buffer_size=slots)
    assert_same(after, expected(arrays, rows, slots or HOT))


def test_all_rows(place, rng):
    arrays = tables(rng)
    after = call(place, hisparse.reset_request_state, arrays)
    wanted = expected(arrays, range(REQUESTS), HOT)
    wanted["lru_slots"].view[REQUESTS] = range(HOT)
    assert_same(after, wanted)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_rows_in_a_vector(place, rng, dtype):
    arrays = tables(rng)
    for vector in (np.array([4, 1], dtype), torch and torch.tensor([4, 1], dtype=getattr(torch, dtype))):
        if vector is None or (place.library == "torch" and place.warp_size is None and vector.__class__ is np.ndarray):
            continue
        after = call(place, hisparse.reset_request_state, arrays, requests=vector)
        assert_same(after, expected(arrays, [1, 4], HOT))


@pytest.mark.gpu
def test_rows_in_a_vector_on_a_gpu():
    tokens = torch.zeros(4, 9, dtype=torch.int32, device="cuda")
    lru = torch.zeros(4, 8, dtype=torch.int16, device="cuda")
    hisparse.reset_request_state(tokens, lru, torch.tensor([1, 3], device="cuda"))
    assert tokens.sum(1).tolist() == [0, -9, 0, -9] and lru[3].tolist() == list(range(8)) and not lru[0].any()


@pytest.mark.parametrize(
    ("error", "arguments", "named"),
    [
        (ValueError, {"requests": 5}, "requests: expected rows of both tables, 0 to 4, got 5"),
        (ValueError, {"requests": -1}, "requests: expected rows of both tables, 0 to 4, got -1"),
        (ValueError, {"requests": [0, 7]}, "requests: .* got 7"),
        (ValueError, {"requests": np.array([0, 7])}, "requests: .* got 7"),
        (TypeError, {"requests": [0, 1.0]}, "requests: expected ints, got float"),
        (TypeError, {"requests": True}, "requests: expected ints, got bool"),
        (TypeError, {"requests": np.array([True] * 5)}, "requests: expected an int32 or int64 vector, got bool"),
        (TypeError, {"requests": np.zeros((1, 1), int)}, "requests: expected an int32 or int64 vector"),
        (ValueError, {"hot_buffer_size": 9}, "hot_buffer_size: expected 1 to 8, the width of lru_slots, got 9"),
        (ValueError, {"hot_buffer_size": 0}, "hot_buffer_size: expected 1 to 12, the width of device_buffer_tokens"),
        (TypeError, {"hot_buffer_size": 2.0}, "hot_buffer_size: expected an int, got float"),
        (TypeError, {"lru_slots": np.zeros((5, 8), np.int32)}, "lru_slots: expected dtype int16, got int32"),
        (TypeError, {"device_buffer_tokens": [[0]]}, "device_buffer_tokens: expected dtype int32, got list"),
        (ValueError, {"lru_slots": np.zeros(8, np.int16)}, "lru_slots: expected shape"),
        (ValueError, {"lru_slots": np.broadcast_to(np.int16(3), (5, 8))}, "lru_slots: expected a writable array"),
    ],
)
def test_errors_change_nothing(rng, error, arguments, named):
    arrays = tables(rng)
    before = {name: array.copy() for name, array in arrays.items()}
    views = {name: array.view for name, array in arrays.items()}
    with pytest.raises(error, match=named):
        hisparse.reset_request_state(**views | arguments)
    assert_same(arrays, before)


def test_f35_a_row_that_is_taken_over_after_growth(place, rng):
    """H grows from 8 to 16, and what the row held beyond was never initialised."""
    case = make_case(rng, [Row(20, [5, 3, 18, 19, -1, 0])], num_top_k=6, hot_buffer_size=16)
    rid = case["req_pool_indices"][0]
    case["device_buffer_tokens"][rid] = 0x7F7F7F7F
    case["lru_slots"][rid] = 0x7F7F
    for name, array in call(
        place,
        hisparse.reset_request_state,
        {name: case.arrays[name] for name in ("device_buffer_tokens", "lru_slots")},
        requests=[int(rid)],
        hot_buffer_size=16,
    ).items():
        case.arrays[name] = array
    with hisparse.checking():
        after = check(place, case)
    assert after.slots(0) == [0, 1, 2, 16, -1, 3]
