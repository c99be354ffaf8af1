"""What a call costs the host: CPU time, the first result of a process, and device memory that calls take."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hisparse

from .state import PAGE_SIZE, State
from .swap_in import Pools
from .targets import Verdict
from .timing import device, synchronize

CALLS = 1000
PROCESSES = 3
HOT_BUFFER = 4096
ITEM_SIZE = 512

# A process of its own: torch loaded, a context created, the tensors there; then the first import and call.
_FIRST_RESULT = """
import sys, time
import torch
where = "cuda" if torch.cuda.is_available() else "cpu"
def tensor(*shape, dtype):
    return torch.zeros(*shape, dtype=dtype, device=where)
tokens = torch.arange(-1, 79, device=where).int().view(1, 80)
arguments = dict(
    top_k_tokens=tokens[:, 10:26].contiguous(), device_buffer_tokens=tokens,
    host_cache_locs=torch.arange(200, device=where).view(1, 200), device_buffer_locs=tokens + 1,
    host_cache=torch.ones(200 * 512, dtype=torch.uint8, pin_memory=where == "cuda"),
    device_buffer=tensor(80 * 512, dtype=torch.uint8), top_k_device_locs=tensor(1, 16, dtype=torch.int32),
    req_pool_indices=tensor(1, dtype=torch.int64), seq_lens=torch.tensor([150], device=where),
    lru_slots=torch.arange(64, device=where).short().view(1, 64), item_size_bytes=512, num_top_k=16,
    hot_buffer_size=64, page_size=16,
)
if where == "cuda":
    torch.cuda.synchronize()
start = time.perf_counter()
import hisparse
imported = time.perf_counter()
hisparse.load_cache_to_device_buffer_mla(**arguments)
if where == "cuda":
    torch.cuda.synchronize()
print((imported - start) * 1e3, (time.perf_counter() - start) * 1e3)
"""


def first_result() -> dict[str, float]:
    """Milliseconds in a fresh process, from before the import to the first result; best of a few processes."""
    root = Path(hisparse.__file__).resolve().parent.parent
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{_FIRST_RESULT}"
    times = []
    for _ in range(PROCESSES):
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        imported, whole = map(float, printed.split())
        times.append((whole, imported))
    whole, imported = min(times)
    return {"import_ms": imported, "first_result_ms": whole}


def _median_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of the host per call; the calls take turns, and the device never has a long queue."""
    times: dict[str, list[int]] = {name: [] for name in calls}
    clock = time.perf_counter_ns
    for i in range(CALLS + 50):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
        if i % 10 == 0:
            synchronize()
    return {name: statistics.median(own[50:]) / 1e3 for name, own in times.items()}


def measure() -> dict[str, Any]:
    """Times of a keyword call at B=1 with all hits, and of torch's ``add_``; the first result; memory of the device."""
    import torch

    state = State(HOT_BUFFER, 0, 1, ordered=False, sequential=False)
    pools = Pools(HOT_BUFFER + PAGE_SIZE, ITEM_SIZE).of(ITEM_SIZE, state.device_items)
    call = partial(hisparse.load_cache_to_device_buffer_mla, **state.arguments(0, *pools, ITEM_SIZE))
    one = torch.zeros(1, device=device())
    calls = {"call_us": call, "add_us": lambda: one.add_(1)}
    if device() == "cpu":
        return _median_us(calls) | first_result() | {"device_bytes": 0}
    call()
    synchronize()
    free = torch.cuda.mem_get_info()[0]
    times = _median_us(calls)
    synchronize()
    return times | first_result() | {"device_bytes": free - torch.cuda.mem_get_info()[0]}


def text_of(figures: dict[str, Any]) -> str:
    return (
        f"Host side\n- a keyword call, B=1, all hits: {figures['call_us']:.2f} us of the host "
        f"(median of {CALLS}); torch.add_ beside it {figures['add_us']:.2f} us\n"
        f"- first result in a fresh process, import included: {figures['first_result_ms']:.0f} ms "
        f"(the import {figures['import_ms']:.0f} ms)\n"
        f"- device memory taken by {CALLS} calls: {figures['device_bytes']} bytes"
    )


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    def verdict(sentence: str, value: float, most: float, unit: str, aim: str = "") -> Verdict:
        return Verdict(sentence, 1, int(value > most), f"{value:.4g} {unit}", aim)

    call = figures["call_us"]
    reached = "; aim reached" if call <= 5.5 else "; aim 5.5 us not reached"
    return [
        verdict("a keyword call: at most 7 us of the host", call, 7.0, "us", reached),
        verdict("first result: at most 100 ms after the import", figures["first_result_ms"], 100.0, "ms"),
        verdict("no device memory per call", figures["device_bytes"], 0, "bytes"),
    ]
