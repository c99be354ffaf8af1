"""Timing work on a GPU inside a graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Time:
    """Microseconds per call: the median over replays, and the distance between the quartiles."""

    median: float
    spread: float


def capture(work: Callable[[], None]) -> Any:
    """A CUDA/HIP graph of ``work``, which ran once before."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # its own default is a stream of the first device that it saw
        work()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_times(graph: Any, replays: int) -> list[float]:
    """Microseconds of each replay."""
    import torch

    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def time_in_graph(call: Callable[[int], None], prepare: Callable[[], None] | None, calls: int, replays: int) -> Time:
    """Time of ``call(i)``, i < calls, each after ``prepare()``, whose own time is taken off.

    Both the graph with the calls and the one without hold ``calls`` times ``prepare``, so that what is left is what
    a call adds to a stream that is busy.
    """

    def everything() -> None:
        for i in range(calls):
            if prepare is not None:
                prepare()
            call(i)

    times = replay_times(capture(everything), replays)
    base = 0.0
    if prepare is not None:

        def preparation() -> None:
            for _ in range(calls):
                prepare()

        base = statistics.median(replay_times(capture(preparation), replays))
    per_call = sorted((t - base) / calls for t in times)
    quarter = len(per_call) // 4
    return Time(statistics.median(per_call), per_call[-1 - quarter] - per_call[quarter])
