"""The state of a request in the tables that the swap-in ops keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .swap_in import Tensor


def reset_request_state(
    device_buffer_tokens: Tensor,
    lru_slots: Tensor,
    requests: int | Sequence[int] | Tensor | None = None,
    *,
    hot_buffer_size: int | None = None,
) -> None:
    """Empties the hot buffers of requests: no slot holds a token, and slot 0 is the least recently used one.

    For each new request, for one that takes over the row of another, and after `hot_buffer_size` has changed. It equals
    ``device_buffer_tokens[requests] = -1; lru_slots[requests, :H] = torch.arange(H)``, and runs where the tables are:
    for a GPU on torch's current stream.

    Args:
        device_buffer_tokens: int32 [R, >= H], written. The whole row becomes -1.
        lru_slots: int16 [R, >= H], written. The first H entries become 0 .. H - 1.
        requests: Rows of both tables: one, a sequence, or an int32 or int64 vector; None for all. A vector on a GPU is
            not looked at.
        hot_buffer_size: H; None for the width of `lru_slots`.

    Raises:
        TypeError: A table has the wrong dtype, or a request is no int.
        ValueError: A table has the wrong shape or is read-only, or a request is no row of both.
    """
    for name, table, bits in (("device_buffer_tokens", device_buffer_tokens, 32), ("lru_slots", lru_slots, 16)):
        if str(getattr(table, "dtype", None)) not in (f"int{bits}", f"torch.int{bits}"):
            got = getattr(table, "dtype", type(table).__name__)
            raise TypeError(f"{name}: expected dtype int{bits}, got {got}")
        if table.ndim != 2:
            raise ValueError(f"{name}: expected shape [rows, slots], got {tuple(table.shape)}")
        if isinstance(table, np.ndarray) and not table.flags.writeable:
            raise ValueError(f"{name}: expected a writable array, got a read-only one")
    slots = lru_slots.shape[1] if hot_buffer_size is None else hot_buffer_size
    if isinstance(slots, bool) or not hasattr(slots, "__index__"):
        raise TypeError(f"hot_buffer_size: expected an int, got {type(slots).__name__}")
    for name, table in (("device_buffer_tokens", device_buffer_tokens), ("lru_slots", lru_slots)):
        if not 1 <= slots <= table.shape[1]:
            raise ValueError(f"hot_buffer_size: expected 1 to {table.shape[1]}, the width of {name}, got {slots}")
    rows = _rows(requests, min(len(device_buffer_tokens), len(lru_slots)))
    device_buffer_tokens[rows] = -1
    lru_slots[rows, :slots] = _first_slots(lru_slots, slots)


def _rows(requests: Any, count: int) -> Any:
    if requests is None:
        return slice(None)
    if hasattr(requests, "dtype"):
        if str(requests.dtype).removeprefix("torch.") not in ("int32", "int64") or requests.ndim > 1:
            raise TypeError(f"requests: expected an int32 or int64 vector, got {requests.dtype}, {requests.ndim}-D")
        if getattr(requests, "is_cuda", False):
            return requests
        listed = np.atleast_1d(np.asarray(requests)).tolist()
    else:
        listed = [requests] if hasattr(requests, "__index__") else list(requests)
    for request in listed:
        if isinstance(request, bool) or not hasattr(request, "__index__"):
            raise TypeError(f"requests: expected ints, got {type(request).__name__}")
        if not 0 <= request < count:
            raise ValueError(f"requests: expected rows of both tables, 0 to {count - 1}, got {request}")
    return listed


def _first_slots(lru_slots: Tensor, slots: int) -> Any:
    if isinstance(lru_slots, np.ndarray):
        return np.arange(slots, dtype=np.int16)
    import torch

    return torch.arange(slots, dtype=torch.int16, device=lru_slots.device)
