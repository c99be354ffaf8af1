"""The links of several GPUs of one host: each alone, and all at once, reading from one pool of pinned memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hisparse

from .state import HOST_ITEMS, TOP_K, VARIANTS, State
from .timing import capture

WORK = ("gather", "swap-in")
ITEM_SIZES = (512, 656, 1152)
HOT_BUFFER_SIZE, BATCH, MISSES = 4096, 24, TOP_K // 5  # of the swap-in
GATHERS = 8  # calls in a graph, which read every item of the pool once
GATHER_BLOCKS = 132
AT_ONCE_US = 100_000  # long beside the time from the first device's start to the last one's

COLUMNS = {
    "work": "work",
    "item_size_bytes": "item",
    "device": "device",
    "alone_us": "alone us",
    "together_us": "together us",
    "alone_gb_per_s": "alone GB/s",
    "together_gb_per_s": "together GB/s",
    "kept": "kept",
}


@dataclass
class Lane:
    """Work of one device: a graph of some calls, what else it does, and the bytes that a call brings over the link."""

    device: int
    work: Callable[[], None]  # what the graph holds; it keeps the memory that the graph uses
    calls: int
    bytes_per_call: int
    other_us: float = 0.0  # of the graph: putting the tables back

    def __post_init__(self) -> None:
        self.graph = capture(self.work)


def gather_lane(device: int, host_pool: Any, item_size_bytes: int) -> Lane:
    import torch

    with torch.cuda.device(device):
        src = torch.randperm(HOST_ITEMS, device="cuda").chunk(GATHERS)
        count = len(src[0])
        dst = torch.randperm(count, device="cuda")
        pool = torch.zeros(count * item_size_bytes, dtype=torch.uint8, device="cuda")

        def gather() -> None:
            for part in src:
                hisparse.copy_items(host_pool, pool, part, dst, item_size_bytes, blocks=GATHER_BLOCKS)

        return Lane(device, gather, GATHERS, count * item_size_bytes)


def swap_in_lane(device: int, host_pool: Any, item_size_bytes: int) -> Lane:
    import torch

    with torch.cuda.device(device):
        state = State(HOT_BUFFER_SIZE, MISSES, BATCH, ordered=False, sequential=False)
        device_pool = torch.zeros(state.device_items * item_size_bytes, dtype=torch.uint8, device="cuda")

        def calls() -> None:
            for variant in range(VARIANTS):
                state.reset()
                arguments = state.arguments(variant, host_pool, device_pool, item_size_bytes)
                hisparse.load_cache_to_device_buffer_mla(**arguments)

        def resets() -> None:
            for _ in range(VARIANTS):
                state.reset()

        (other_us,) = times([Lane(device, resets, 1, 0)], 50)
        return Lane(device, calls, VARIANTS, BATCH * MISSES * item_size_bytes, other_us)


def times(lanes: list[Lane], replays: int) -> list[float]:
    """Microseconds per replay of each lane's graph, while all of them run."""
    import torch

    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in lanes]

    def record(which: int) -> None:
        for lane, pair in zip(lanes, events, strict=True):
            pair[which].record(torch.cuda.current_stream(lane.device))

    for lane in lanes:
        torch.cuda.synchronize(lane.device)
    record(0)
    for _ in range(replays):
        for lane in lanes:
            lane.graph.replay()
    record(1)
    for lane in lanes:
        torch.cuda.synchronize(lane.device)
    return [start.elapsed_time(end) * 1e3 / replays for start, end in events]


def call_times(lanes: list[Lane], repeats: int = 5) -> list[float]:
    """Microseconds per call of each lane, while all of them run: medians."""
    replays = max(2, round(AT_ONCE_US / min(times(lanes, 2))))
    runs = [times(lanes, replays) for _ in range(repeats)]
    medians = map(statistics.median, zip(*runs, strict=True))
    return [(time - lane.other_us) / lane.calls for time, lane in zip(medians, lanes, strict=True)]


def measure(
    devices: tuple[int, ...],
    item_sizes: tuple[int, ...] = ITEM_SIZES,
    progress: Callable[[list[Any]], Any] = lambda cases: cases,
) -> Iterator[dict[str, Any]]:
    """A row per kind of work, item size and device. Times in microseconds per call, rates in GB/s (1e9 bytes)."""
    import torch

    host_pool = torch.empty(HOST_ITEMS * max(item_sizes), dtype=torch.uint8, pin_memory=True)
    host_pool.view(torch.int32).random_()
    make = {"gather": gather_lane, "swap-in": swap_in_lane}
    for work, size in progress([(work, size) for work in WORK for size in item_sizes]):
        lanes = [make[work](device, host_pool[: HOST_ITEMS * size], size) for device in devices]
        alone = [call_times([lane])[0] for lane in lanes]
        for lane, alone_us, together_us in zip(lanes, alone, call_times(lanes), strict=True):
            yield {
                "work": work,
                "item_size_bytes": size,
                "device": lane.device,
                "alone_us": alone_us,
                "together_us": together_us,
                "alone_gb_per_s": lane.bytes_per_call / alone_us / 1e3,
                "together_gb_per_s": lane.bytes_per_call / together_us / 1e3,
                "kept": alone_us / together_us,
            }
