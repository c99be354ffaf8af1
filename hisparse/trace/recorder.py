"""Takes the selections of a run and writes them to a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .file import Trace

_recorders: list[Recorder] = []


class Recorder:
    """Collects selections, call by call. A step ends where a layer comes a second time."""

    def __init__(self, source: str = "") -> None:
        self._source, self._block_tokens = source, 1
        self._steps: list[dict[int, tuple[np.ndarray, list[int], list[int]]]] = []

    def add(
        self,
        layer: int,
        top_k: np.ndarray,
        seq_lens: Sequence[int],
        requests: Sequence[int] | None = None,
        block_tokens: int = 1,
    ) -> None:
        """The selections of one layer in one step.

        Args:
            layer: Its number.
            top_k: Integers [rows, K], -1 for an unused entry; rows of padding left out.
            seq_lens: The length of each row, with the newest token.
            requests: Which request each row is of: a number that no other request of the run has. None for 0, 1, ...
            block_tokens: Tokens that an entry stands for, in all calls the same.
        """
        if not self._steps or layer in self._steps[-1]:
            self._steps.append({})
        names = list(range(len(top_k))) if requests is None else list(requests)
        if not len(top_k) == len(seq_lens) == len(names):
            raise ValueError(f"{len(top_k)} rows of top_k, {len(seq_lens)} of seq_lens, {len(names)} of requests")
        self._steps[-1][layer] = (np.array(top_k, np.int32), list(seq_lens), names)
        self._block_tokens = block_tokens

    def trace(self) -> Trace:
        """What was added up to now."""
        layers = sorted({layer for step in self._steps for layer in step})
        calls = [call for step in self._steps for call in step.values()]
        rows = max((len(call[0]) for call in calls), default=0)
        width = max((call[0].shape[1] for call in calls), default=0)
        top_k = np.full((len(self._steps), len(layers), rows, width), -1, np.int32)
        lengths, requests = (np.full((len(self._steps), rows), fill, np.int32) for fill in (0, -1))
        for n, step in enumerate(self._steps):
            for layer, (selected, seq_lens, names) in step.items():
                top_k[n, layers.index(layer), : len(selected), : selected.shape[1]] = selected
                lengths[n, : len(names)], requests[n, : len(names)] = seq_lens, names
        return Trace(top_k, lengths, requests, np.array(layers, np.int32), self._block_tokens, self._source)


@contextmanager
def recording(path: str | Path, source: str = "") -> Iterator[Recorder]:
    """Writes the selections of every ``hisparse.HotBufferCache`` inside the ``with`` block to a trace at ``path``.

    Each swap-in then waits for its selection to be copied to the host. A run without a HotBufferCache calls
    :meth:`Recorder.add` on what the block is given. The file is written at the end, also after an exception.
    """
    recorder = Recorder(source)
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)
        recorder.trace().save(path)


def is_active() -> bool:
    return bool(_recorders)


def add(layer: int, top_k: np.ndarray, seq_lens: list[int], requests: list[int], block_tokens: int) -> None:
    for recorder in _recorders:
        recorder.add(layer, top_k, seq_lens, requests, block_tokens)
