"""Numbers, and a plot, of a trace's replays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .replay import Link, Replay

COLUMNS = {
    "hot_buffer_size": "H",
    "hit_rate_percent": "hits %",
    "misses_mean": "misses",
    "misses_p99": "p99",
    "misses_max": "max",
    "mb_per_step": "MB",
    "us_mean": "us",
    "us_p99": "us p99",
    "device_mb_per_request": "device MB",
}

_LINES = 4  # as many of the sizes can be told apart step by step


def rows(replays: Sequence[Replay], token_bytes: int, link: Link) -> list[dict[str, Any]]:
    """One row per H, and a first one, H = 0, in which every read is copied. Per step, all layers and rows together."""
    first = replays[0]
    return [_row(replay, token_bytes, link) for replay in (Replay(0, first.reads, first.reads), *replays)]


def _row(replay: Replay, token_bytes: int, link: Link) -> dict[str, Any]:
    misses, seconds = replay.misses.sum(axis=1), link.step_seconds(replay.misses, token_bytes)
    slots = replay.hot_buffer_size + 1 if replay.hot_buffer_size else 0
    return {
        "hot_buffer_size": replay.hot_buffer_size,
        "hit_rate_percent": None if replay.hit_rate is None else 100 * replay.hit_rate,
        "misses_mean": float(misses.mean()),
        "misses_p99": float(np.percentile(misses, 99)),
        "misses_max": int(misses.max()),
        "mb_per_step": float(misses.mean()) * token_bytes / 1e6,
        "us_mean": float(seconds.mean()) * 1e6,
        "us_p99": float(np.percentile(seconds, 99)) * 1e6,
        "device_mb_per_request": slots * token_bytes * replay.misses.shape[1] / 1e6,
    }


def plot(path: Path, replays: Sequence[Replay], table: Sequence[dict[str, Any]], title: str) -> None:
    """Hit rate and time against H, and the misses of each step. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = [row for row in table if row["hot_buffer_size"]]
    sizes = [row["hot_buffer_size"] for row in table]
    figure, (hits, times, steps) = pyplot.subplots(1, 3, figsize=(16, 4.5))
    hits.plot(sizes, [row["hit_rate_percent"] for row in table], "o-")
    hits.set_ylabel("hits, % of the reads")
    times.plot(sizes, [row["us_mean"] for row in table], "o-", label="mean")
    times.plot(sizes, [row["us_p99"] for row in table], "o:", label="99th percentile")
    times.set(ylabel="expected us per step, all layers", ylim=(0, None))
    times.legend()
    for axes in (hits, times):
        axes.set(xscale="log", xlabel="H, slots per request and layer")
        axes.set_xticks(sizes, [str(size) for size in sizes], rotation=60)
        axes.minorticks_off()
    shown = sorted({round(place) for place in np.linspace(0, len(replays) - 1, _LINES)})
    for replay in (replays[place] for place in shown):
        steps.plot(replay.misses.sum(axis=1), label=f"H = {replay.hot_buffer_size}", linewidth=1)
    steps.set(xlabel="step", ylabel="misses, all layers and rows", ylim=(0, None))
    steps.legend()
    for axes in (hits, times, steps):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
