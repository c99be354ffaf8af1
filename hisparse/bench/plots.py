"""Plots of measured rows. They need matplotlib: ``pip install hisparse[bench]``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def can_plot() -> bool:
    """Whether matplotlib is there; says so on standard error where it is not."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print("No plots: matplotlib is missing (pip install hisparse[bench]).", file=sys.stderr)
    return found


def _figure(titles: Sequence[str], columns: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(titles) // columns)
    figure, sides = pyplot.subplots(lines, columns, figsize=(5.5 * columns, 4.4 * lines), squeeze=False)
    used = list(sides.flat)[: len(titles)]
    for side in list(sides.flat)[len(titles) :]:
        side.set_axis_off()
    for side, title in zip(used, titles, strict=True):
        side.set_title(title, fontsize=10)
        side.grid(alpha=0.3)
    return figure, used


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lines(side: Any, line: list[dict[str, Any]], across: str, ours: str, others: dict[str, str], label: str) -> None:
    """Ours as a solid line, and others by their style in the same colour, where every row has a value."""
    (drawn,) = side.plot([row[across] for row in line], [row[ours] for row in line], "o-", label=label, markersize=4)
    for key, style in others.items():
        values = [row[key] for row in line]
        if all(values):
            side.plot([row[across] for row in line], values, style, color=drawn.get_color(), alpha=0.7)


def _log_axis(side: Any, name: str, values: list[int]) -> None:
    side.set(xscale="log", xlabel=name)
    side.set_xticks(values, map(str, values))
    side.minorticks_off()


def _legend(side: Any, rows: list[dict[str, Any]], dotted: str) -> None:
    peer = any(row["peer_us"] is not None for row in rows)
    side.legend(title=f"dotted: {dotted}" + (", dashed: peer" if peer else ""), fontsize=8, title_fontsize=8)


def plot_swap_in(path: Path, rows: list[dict[str, Any]]) -> None:
    """Time against batch for each size of the hot buffer, and bandwidth against the gather ceiling."""
    first = rows[0]
    rows = [row for row in rows if all(row[key] == first[key] for key in ("state", "host_order"))]
    hot_sizes = sorted({row["hot_buffer_size"] for row in rows})
    misses = sorted({row["miss_rate"] for row in rows}, reverse=True)
    batches = sorted({row["batch"] for row in rows})
    item = min(row["item_size_bytes"] for row in rows)
    state = f"{first['state']} tables, {first['host_order']} host order"
    figure, sides = _figure([*(f"H={hot}, {item} B items, {state}" for hot in hot_sizes), f"{misses[0]:.1%} misses"], 2)
    for side, hot in zip(sides[:-1], hot_sizes, strict=True):
        for miss in misses:
            chosen = {"hot_buffer_size": hot, "item_size_bytes": item, "miss_rate": miss}
            line = [row for row in rows if row | chosen == row]
            label = f"{miss:.1%} misses" if miss else "all hits"
            _lines(side, line, "batch", "us", {"floor_us": ":", "peer_us": "--"}, label)
        _log_axis(side, "batch", batches)
        side.set(yscale="log", ylabel="us per call")
        _legend(side, rows, "plain copy")
    for size in sorted({row["item_size_bytes"] for row in rows}):
        chosen = {"hot_buffer_size": hot_sizes[0], "item_size_bytes": size, "miss_rate": misses[0]}
        line = [row for row in rows if row | chosen == row]
        _lines(sides[-1], line, "batch", "gb_per_s", {"ceiling_gb_per_s": ":"}, f"{size} B")
    _log_axis(sides[-1], "batch", batches)
    sides[-1].set(ylabel=f"GB/s, H={hot_sizes[0]}", ylim=(0, None))
    _legend(sides[-1], [], "gather ceiling")
    _save(figure, path)


def plot_kvcacheio(path: Path, rows: list[dict[str, Any]]) -> None:
    """GB/s against block_quota, one side for each op and direction of the largest number of items."""
    many = max(row["items"] for row in rows)
    rows = [row for row in rows if row["items"] == many]
    kinds = list(dict.fromkeys((row["op"], row["direction"]) for row in rows))
    figure, sides = _figure([f"{op}, {many} items, {direction}" for op, direction in kinds], 2)
    for side, kind in zip(sides, kinds, strict=True):
        chosen = [row for row in rows if (row["op"], row["direction"]) == kind]
        for size in sorted({row["item_size_bytes"] for row in chosen}):
            line = [row for row in chosen if row["item_size_bytes"] == size]
            _lines(side, line, "block_quota", "gb_per_s", {"ceiling_gb_per_s": ":", "peer_gb_per_s": "--"}, f"{size} B")
        _log_axis(side, "block_quota", sorted({row["block_quota"] for row in chosen}))
        side.set(ylabel="GB/s", ylim=(0, None))
        _legend(side, chosen, "plain copy")
    _save(figure, path)
