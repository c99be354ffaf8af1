"""Draws README's plot from the rows of a run: python benchmarks/plot_readme.py docs/data/h200_swap_in.json

The file is the swap_in.json of `hisparse bench --out FOLDER`. Of its rows those of the shuffled state are drawn, for
one size of the hot buffer and of the items; a peer's beside them, where the run had one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "swap_in.svg"
COLORS = {0.2: "#b91c1c", 0.05: "#c2410c", 0.001: "#1d4ed8", 0.0: "#15803d"}
INK = "#334155"


def chosen(data: dict[str, Any], hot_buffer_size: int = 4096, item_size_bytes: int = 512) -> list[dict[str, Any]]:
    wanted = {
        "state": "shuffled",
        "host_order": "random",
        "hot_buffer_size": hot_buffer_size,
        "item_size_bytes": item_size_bytes,
    }
    rows = [row for row in data["rows"] if all(row[key] == value for key, value in wanted.items())]
    return sorted(rows, key=lambda row: row["batch"])


def draw(data: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Text stays text, and the same data gives the same file.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hisparse", "font.size": 10})
    pyplot.rcParams.update({"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
    figure, axes = pyplot.subplots(figsize=(7.6, 3.7), facecolor="white")
    rows = chosen(data)
    with_peer = all(row.get("peer_us") is not None for row in rows)
    for miss_rate in sorted({row["miss_rate"] for row in rows}, reverse=True):
        line = [row for row in rows if row["miss_rate"] == miss_rate]
        batches, color = [row["batch"] for row in line], COLORS[miss_rate]
        label = f"{100 * miss_rate:g} % misses" if miss_rate > 0 else "every position hits"
        axes.plot(batches, [row["us"] for row in line], "o-", color=color, markersize=4)
        axes.annotate(label, (batches[-1], line[-1]["us"]), (8, -3), textcoords="offset points", color=color)
        if miss_rate > 0:
            axes.plot(batches, [row["floor_us"] for row in line], ":", color=color)
        if with_peer:
            axes.plot(batches, [row["peer_us"] for row in line], "--", color=color, linewidth=1, alpha=0.7)
    batches = sorted({row["batch"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="requests in the batch", ylabel="microseconds per call")
    axes.set_xticks(batches, list(map(str, batches)))
    axes.set_xticks([], minor=True)
    axes.set_yticks(ticks := [2, 5, 10, 20, 50, 100, 200, 500], list(map(str, ticks)))
    axes.set_yticks([], minor=True)
    axes.set_title(
        f"Swap-in of 2048 positions a request, {rows[0]['item_size_bytes']} B items, one {data['machine']['device']}\n"
        "dotted: a kernel that only copies the same items"
        + (f"; dashed: {data['machine'].get('peer', 'the peer')}" if with_peer else ""),
        fontsize=10,
    )
    axes.grid(color="#e2e8f0")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    draw(json.loads(args.data.read_text()), args.out)


if __name__ == "__main__":
    main()
