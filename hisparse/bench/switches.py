"""Parts of the item copy left out one by one, to see what each brings: word width, load hint, gate, blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import hisparse
from hisparse import _C

from .state import VARIANTS
from .swap_in import Case, Pools
from .timing import device, time_together

MISS_RATE = 0.2
BATCHES = (1, 24)
COPY_BLOCKS = (4, 16, 24, 132, 528)
BLOCKS_PER_REQUEST = (1, 2, 4, 8, 16)
HOT_BUFFER = 4096

PARTS = ("wide words", "load hint", "gate")

COLUMNS = {
    "what": "what",
    "items": "items",
    "item_size_bytes": "item",
    "blocks": "blocks",
    "variant": "variant",
    "us": "us",
    "spread": "spread",
    "change": "change",
}


@contextmanager
def leave_out(part: str) -> Iterator[None]:
    """Runs the calls inside the ``with`` block without a part of the item copy, process-wide.

    The results stay the same, byte for byte. A graph keeps what its calls were captured with.

    Args:
        part: "wide words": 8 bytes per lane and step in the place of 16, in the swap-in too. "load hint":
            ``copy_items`` loads without saying that the data is read once (non-temporal on AMD GPUs; the first to
            leave L1 on NVIDIA GPUs). "gate": on AMD GPUs, ``copy_items`` moves 16 bytes per lane also
            where that does not fill a wavefront.
    """
    _C.leave_out(1 + PARTS.index(part))
    try:
        yield
    finally:
        _C.leave_out(0)


def _without(part: str, call: Callable[[int], None]) -> Callable[[int], None]:
    def inside(i: int) -> None:
        with leave_out(part):
            call(i)

    return inside


def _rows(what: str, items: int, item: int, blocks: int | None, calls: dict[str, Any], **timing: Any) -> Iterator[dict]:
    times = time_together(calls, VARIANTS, **timing)
    base = next(iter(times.values())).median
    for variant, time in times.items():
        row = {"what": what, "items": items, "item_size_bytes": item, "blocks": blocks, "variant": variant}
        yield row | {"us": time.median, "spread": time.spread, "change": f"{time.median / base - 1:+.1%}"}


def measure(item_sizes: Iterable[int], progress: Callable[[list[Any]], Iterable[Any]] = lambda all: all) -> list[dict]:
    """Rows of the copy alone, without each part, and of a swap-in."""
    item_sizes = list(item_sizes)
    batches = BATCHES if device() == "cuda" else BATCHES[:1]
    states = {batch: Case("shuffled", "random", HOT_BUFFER, batch, MISS_RATE, 0).make_state() for batch in batches}
    pools = Pools(max(state.device_items for state in states.values()), max(item_sizes))
    rows: list[dict] = []
    for batch, item in progress([(batch, item) for batch in batches for item in item_sizes]):
        state = states[batch]
        count = batch * state.misses
        ends = pools.of(item, state.device_items)
        plans = state.plans(*ends, item)
        for blocks in COPY_BLOCKS:

            def copy(i: int, ends: Any = ends, plans: Any = plans, item: int = item, blocks: int = blocks) -> None:
                hisparse.copy_items(*ends, *plans[i], item, blocks=blocks)

            calls = {"shipped": copy} | {f"no {part}": _without(part, copy) for part in PARTS}
            rows += _rows("copy_items", count, item, blocks, calls)

        def swap_in(i: int, state: Any = state, ends: Any = ends, item: int = item, **options: Any) -> None:
            hisparse.load_cache_to_device_buffer_mla(**state.arguments(i, *ends, item), **options)

        calls = {"shipped": swap_in, "no copy": partial(swap_in, skip_io=True)}
        calls["no wide words"] = _without("wide words", swap_in)
        for blocks in BLOCKS_PER_REQUEST:
            calls[f"{blocks} blocks per request"] = partial(swap_in, blocks_per_request=blocks)
        rows += _rows("swap-in", count, item, None, calls, prepare=state.reset)
    return rows
