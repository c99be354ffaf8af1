"""Times work on the current GPU inside graphs, or on the CPU target by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 0.02  # of measuring per work
ROUNDS = (7, 100)  # at least and at most so many, whatever the time


@dataclass(frozen=True)
class Time:
    """Microseconds per call: the median over rounds, and the distance between the quartiles."""

    median: float
    spread: float


def device() -> str:
    """What torch can use here: "cuda", which is a GPU of either vendor, or "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    import torch

    if device() == "cuda":
        torch.cuda.synchronize()


def warm_up(seconds: float = 0.5) -> None:
    """Keeps a GPU busy until its clocks are up: the first rows of a run of its own took up to 2 us more (H200)."""
    import torch

    if device() == "cpu":
        return
    numbers = torch.ones(1 << 20, device=device())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(100):
            numbers.mul_(1)
        synchronize()


def capture(work: Callable[[], None]) -> Any:
    """A CUDA/HIP graph of ``work``, which ran once before."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        # torch.cuda.graph() would collect garbage each time, which takes longer than all the replays.
        graph.capture_begin()
        work()
        graph.capture_end()
    return graph


def _graph_rounds(graphs: Sequence[Any], rounds: int) -> list[list[float]]:
    import torch

    def events() -> Any:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    marks = [[events() for _ in range(rounds)] for _ in graphs]
    for i in range(rounds):
        for graph, own in zip(graphs, marks, strict=True):
            start, end = own[i]
            start.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) * 1e3 for start, end in own] for own in marks]


def _clock_rounds(works: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, own in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            own.append((time.perf_counter() - start) * 1e6)
    return times


def time_together(
    calls: dict[str, Callable[[int], None]],
    variants: int,
    prepare: Callable[[], None] | None = None,
    seconds: float = SECONDS,
) -> dict[str, Time]:
    """Times of calls that take turns, so that what changes on the machine meanwhile changes all of them.

    Of each name, ``call(i)`` runs for every i < ``variants``, each after ``prepare()``, whose own time is taken off:
    what is left is what a call adds to a stream that is busy. ``seconds`` is about how long each name is measured.
    """

    def work(call: Callable[[int], None] | None) -> Callable[[], None]:
        def everything() -> None:
            for i in range(variants):
                if prepare is not None:
                    prepare()
                if call is not None:
                    call(i)

        return everything

    works = [work(call) for call in calls.values()] + ([work(None)] if prepare is not None else [])
    on_gpu = device() == "cuda"
    measure = _graph_rounds if on_gpu else _clock_rounds
    ready = [capture(each) for each in works] if on_gpu else works
    first = sum(own[0] for own in measure(ready, 1)) / len(ready)
    least, most = ROUNDS
    rounds = max(least, min(most, int(seconds * 1e6 / max(first, 1.0))))
    times = measure(ready, rounds)
    base = statistics.median(times.pop()) if prepare is not None else 0.0

    def per_call(own: list[float]) -> Time:
        each = sorted((t - base) / variants for t in own)
        quarter = len(each) // 4
        return Time(statistics.median(each), each[-1 - quarter] - each[quarter])

    return {name: per_call(own) for name, own in zip(calls, times, strict=True)}
