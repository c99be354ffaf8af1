"""What the op does with recorded selections, for any H, without moving a byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hisparse.progress import progress

from .file import Trace


class HotBuffer:
    """Residency of one request in one layer: the rules of ``hisparse.load_cache_to_device_buffer_mla``.

    Its LRU order is by step, and inside a step filled slots come before hit ones. Which of them were filled depends on
    H, and with it the order: so every H takes a run of its own, although a larger one holds what a smaller one does.
    """

    def __init__(self, hot_buffer_size: int, first_length: int | None, longest: int) -> None:
        self._size = hot_buffer_size
        self._slot_of = np.full(longest, -1, np.int32)
        self._token_of = np.full(hot_buffer_size, -1, np.int32)
        self._order = np.arange(hot_buffer_size)
        # A prompt that fits lies in the hot buffer, and the request fills it up before the op evicts anything.
        if first_length is not None and first_length - 1 <= hot_buffer_size:
            in_order = np.arange(min(hot_buffer_size, longest), dtype=np.int32)
            self._slot_of[: len(in_order)], self._token_of[: len(in_order)] = in_order, in_order

    def step(self, tokens: np.ndarray, length: int | None) -> tuple[int, int]:
        """Reads and misses of one selection; ``tokens`` are positions in the order of its entries."""
        valid = tokens[tokens >= 0] if length is None else tokens[(tokens >= 0) & (tokens < length)]
        if length is not None and length <= self._size:
            return len(valid), 0
        wanted = valid if length is None else valid[valid != length - 1]
        _, first_places = np.unique(wanted, return_index=True)
        wanted = wanted[np.sort(first_places)]
        slots = self._slot_of[wanted]
        misses = wanted[slots < 0]

        is_hit = np.zeros(self._size, bool)
        is_hit[slots[slots >= 0]] = True
        hit_in_order = is_hit[self._order]
        free = self._order[~hit_in_order]
        filled = free[: len(misses)]
        evicted = self._token_of[filled]
        self._slot_of[evicted[evicted >= 0]] = -1
        self._token_of[filled] = misses
        self._slot_of[misses] = filled
        self._order = np.concatenate([free[len(misses) :], filled, self._order[hit_in_order]])
        return len(valid), len(misses)


@dataclass(frozen=True)
class Replay:
    """What one size of hot buffers made of a trace.

    Attributes:
        hot_buffer_size: H.
        reads: int64 [steps, layers], positions that got a device loc, summed over the rows.
        misses: int64 [steps, layers], those of them whose item had to be copied from the host.
    """

    hot_buffer_size: int
    reads: np.ndarray
    misses: np.ndarray

    @property
    def hit_rate(self) -> float | None:
        """None where nothing was read."""
        reads = int(self.reads.sum())
        return 1 - int(self.misses.sum()) / reads if reads else None

    def times(self, count: int) -> Replay:
        """Of a batch with so many requests like each of the trace's."""
        return Replay(self.hot_buffer_size, count * self.reads, count * self.misses)

    def without_first(self, steps: int) -> Replay:
        """The same, the first steps left out: a hot buffer that starts empty has to be filled once."""
        return Replay(self.hot_buffer_size, self.reads[steps:], self.misses[steps:])


@dataclass(frozen=True)
class Link:
    """The way from host to device.

    Attributes:
        bytes_per_second: The rate at which a swap-in's copies go.
        overhead_seconds: Time of a swap-in in which everything hits.
    """

    bytes_per_second: float
    overhead_seconds: float

    def step_seconds(self, misses: np.ndarray, token_bytes: int) -> np.ndarray:
        """Expected time of a step's swap-ins, one a layer: float64 [steps] of misses [steps, layers]."""
        seconds = self.overhead_seconds + misses * (token_bytes / self.bytes_per_second)
        return seconds.sum(axis=1)


def replay(trace: Trace, hot_buffer_sizes: Sequence[int]) -> list[Replay]:
    """Runs the op's rules over a trace, once for each H.

    Equals the misses of ``hisparse.load_cache_to_device_buffer_mla`` in a run with the same selections. A request that
    comes up first with at most H + 1 tokens had all of them in its hot buffer; any other starts with an empty one.

    Raises:
        ValueError: An H is smaller than the tokens of a selection.
    """
    for size in hot_buffer_sizes:
        if size < trace.selected_tokens:
            raise ValueError(
                f"hot_buffer_sizes: expected at least the {trace.selected_tokens} tokens of a selection, got {size}"
            )
    return [_replay(trace, size) for size in progress(hot_buffer_sizes, "replay")]


def _replay(trace: Trace, size: int) -> Replay:
    steps, layers, rows, _ = trace.top_k.shape
    reads, misses = np.zeros((2, steps, layers), np.int64)
    buffers: dict[tuple[int, int], HotBuffer] = {}
    longest = trace.longest + 1
    for step in range(steps):
        for row in range(rows):
            length = None if trace.seq_lens is None else int(trace.seq_lens[step, row])
            request = row if trace.requests is None else int(trace.requests[step, row])
            if length == 0:
                continue
            for layer in range(layers):
                tokens = _tokens(trace.top_k[step, layer, row], trace.block_tokens)
                key = (layer, request)
                if key not in buffers:
                    buffers[key] = HotBuffer(size, length, longest)
                counts = buffers[key].step(tokens, length)
                reads[step, layer] += counts[0]
                misses[step, layer] += counts[1]
    return Replay(size, reads, misses)


def _tokens(entries: np.ndarray, block_tokens: int) -> np.ndarray:
    if block_tokens == 1:
        return entries
    tokens = entries[:, None] * block_tokens + np.arange(block_tokens, dtype=np.int32)
    return np.where(entries[:, None] < 0, -1, tokens).reshape(-1)
