"""Tables, JSON and plots of measured rows."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hisparse

COLUMNS = {
    "hot_buffer_size": "H",
    "item_size_bytes": "item",
    "miss_rate": "miss",
    "batch": "B",
    "us": "us",
    "spread": "spread",
    "floor_us": "floor",
    "over_floor_us": "over",
    "floor_blocks": "grid",
    "gb_per_s": "GB/s",
    "ceiling_gb_per_s": "ceiling",
    "share_of_ceiling": "share",
    "one_block_us": "one block",
    "peer_us": "peer",
}


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"
    return str(value)


def table(rows: Iterable[dict[str, Any]], titles: dict[str, str] = COLUMNS) -> str:
    """A Markdown table. Times in microseconds, sizes in bytes, rates in GB/s."""
    rows = list(rows)
    columns = {key: title for key, title in titles.items() if any(row.get(key) is not None for row in rows)}
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---:|" * len(columns)]
    lines += ["| " + " | ".join(_text(row[key]) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What a figure needs beside it: device, driver stack, versions and the commit where there is one."""
    import torch

    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        commit = ""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hisparse": hisparse.__version__,
        "commit": commit,
    }


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Time against batch, and bandwidth against the ceiling, of the shuffled state."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shuffled = [row for row in rows if not row["ordered"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    hot = min(row["hot_buffer_size"] for row in shuffled)
    size = min(row["item_size_bytes"] for row in shuffled)
    for miss in sorted({row["miss_rate"] for row in shuffled}, reverse=True):
        line = [
            r for r in shuffled if (r["hot_buffer_size"], r["item_size_bytes"], r["miss_rate"]) == (hot, size, miss)
        ]
        (drawn,) = left.plot([r["batch"] for r in line], [r["us"] for r in line], "o-", label=f"{miss:.1%} misses")
        left.plot([r["batch"] for r in line], [r["floor_us"] for r in line], ":", color=drawn.get_color())
        if all(r["peer_us"] is not None for r in line):
            left.plot(
                [r["batch"] for r in line], [r["peer_us"] for r in line], "--", color=drawn.get_color(), alpha=0.5
            )
    left.set(xscale="log", yscale="log", xlabel="batch", ylabel="us per call", title=f"H={hot}, {size} B items")
    left.legend(title="dotted: plain copy, dashed: peer")
    miss = max(row["miss_rate"] for row in shuffled)
    for size in sorted({row["item_size_bytes"] for row in shuffled}):
        line = [
            r for r in shuffled if (r["hot_buffer_size"], r["item_size_bytes"], r["miss_rate"]) == (hot, size, miss)
        ]
        (drawn,) = right.plot([r["batch"] for r in line], [r["gb_per_s"] for r in line], "o-", label=f"{size} B")
        right.plot([r["batch"] for r in line], [r["ceiling_gb_per_s"] for r in line], ":", color=drawn.get_color())
    right.set(xscale="log", xlabel="batch", ylabel="GB/s", title=f"{miss:.0%} misses, H={hot}")
    right.legend(title="dotted: gather ceiling")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
