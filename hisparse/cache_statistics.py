"""Counts of swap-ins that stay on the device until somebody reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hisparse.arrays import Arrays
from hisparse.kv_pools import Tables


@dataclass(frozen=True)
class LayerStatistics:
    """Reads: positions that got a device loc. Misses: those whose item was copied from the host for it."""

    reads: int
    misses: int

    @property
    def hits(self) -> int:
        """Reads that cost no copy: resident tokens, the newest, and further entries for the same token."""
        return self.reads - self.misses

    @property
    def hit_rate(self) -> float | None:
        """None where nothing was read."""
        return self.hits / self.reads if self.reads else None


@dataclass(frozen=True)
class Statistics(LayerStatistics):
    """Sums over all layers, and each layer.

    Attributes:
        host_to_device_bytes: Of the misses.
        device_to_host_bytes: Of the tokens that were decoded.
        seconds: Of the swap-ins that were timed; None without ``timing``.
    """

    host_to_device_bytes: int
    device_to_host_bytes: int
    seconds: float | None
    layers: tuple[LayerStatistics, ...]


class Counters:
    """A step's counts by leading layer, and the sums of all steps before it."""

    def __init__(self, arrays: Arrays, leaders: int, max_batch: int, enabled: bool, timing: bool) -> None:
        self._arrays, self._enabled = arrays, enabled
        self.miss_count = arrays.full((leaders, max_batch), 0, "int32")
        self._step_reads = arrays.full((leaders,), 0, "int64")
        self._totals = arrays.full((2, leaders), 0, "int64")
        self._pending: Any = None
        self._latest = np.zeros((2, leaders), np.int64)
        self._timer = Timer(arrays) if timing else None

    def next_step(self) -> None:
        if self._enabled:
            self._totals[:] = self._up_to_now()
            self._step_reads[:] = 0
            # Rows that are padding in the next step keep their count through it.
            self.miss_count[:] = 0

    @contextmanager
    def swap_in(self, index: int, tables: Tables, records_misses: bool) -> Iterator[None]:
        """Around the op. Where it does not count its misses, they are the slots that got another token."""
        before = self._slot_tokens(tables) if self._enabled and not records_misses else None
        if self._timer:
            with self._timer.measure():
                yield
        else:
            yield
        if self._enabled:
            self._step_reads[index] = (tables.out >= 0).sum()
        if before is not None:
            tables.miss_count[:] = (before != self._slot_tokens(tables)).sum(1)

    def _slot_tokens(self, tables: Tables) -> Any:
        """A copy, [rows, H]."""
        return tables.tokens[self._arrays.as_type(tables.req_pool_indices, "int64"), : tables.hot_buffer_size]

    def _up_to_now(self) -> Any:
        totals = self._totals + 0
        totals[0] += self._step_reads
        totals[1] += self.miss_count.sum(1)
        return totals

    def read(self, wait: bool, index_of_layer: Sequence[int], token_bytes: int, backed_up_bytes: int) -> Statistics:
        if wait:
            self._latest = self._arrays.to_numpy(self._up_to_now())
            self._pending = None
        else:
            if self._pending is None:
                self._pending = self._arrays.start_copy(self._up_to_now())
            if self._pending.is_done():
                self._latest, self._pending = self._pending.values, None
        layers = tuple(LayerStatistics(*map(int, self._latest[:, index])) for index in index_of_layer)
        misses = sum(layer.misses for layer in layers)
        return Statistics(
            reads=sum(layer.reads for layer in layers),
            misses=misses,
            host_to_device_bytes=misses * token_bytes,
            device_to_host_bytes=backed_up_bytes,
            seconds=self._timer.seconds(wait) if self._timer else None,
            layers=layers,
        )


class Timer:
    """Sums up the time of swap-ins: by events on a GPU, except in graphs, and by the clock elsewhere."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays, self._seconds = arrays, 0.0
        self._running: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self._arrays.is_capturing():
            yield
            return
        start = self._arrays.time_mark()
        yield
        self._running.append((start, self._arrays.time_mark()))
        self._collect()

    def seconds(self, wait: bool) -> float:
        if wait:
            self._arrays.synchronize()
        self._collect()
        return self._seconds

    def _collect(self) -> None:
        while self._running and self._running[0][1].is_done():
            start, end = self._running.popleft()
            self._seconds += end.seconds_since(start)
