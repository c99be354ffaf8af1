"""Tables and JSON of measured rows."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hisparse

from .timing import device

SWAP_IN_COLUMNS = {
    "state": "state",
    "host_order": "host",
    "hot_buffer_size": "H",
    "batch": "B",
    "miss_rate": "miss",
    "item_size_bytes": "item",
    "us": "us",
    "spread": "spread",
    "floor_us": "floor",
    "over_floor_us": "over",
    "share_of_floor": "floor/us",
    "floor_blocks": "grid",
    "gb_per_s": "GB/s",
    "ceiling_gb_per_s": "ceiling",
    "share_of_ceiling": "share",
    "one_block_us": "one block",
    "peer_us": "peer us",
    "peer_ratio": "peer/ours",
}


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _column(values: list[Any]) -> list[str]:
    """The cells of a column, with as many decimals as its largest number leaves room for."""
    largest = max((abs(value) for value in values if isinstance(value, float)), default=0.0)
    decimals = 3 if largest < 2 else 2 if largest < 20 else 1
    texts = (f"{value:.{decimals}f}" if isinstance(value, float) else str(value) for value in values)
    return ["" if value is None else text for value, text in zip(values, texts, strict=True)]


def table(rows: Iterable[dict[str, Any]], titles: dict[str, str]) -> str:
    """A Markdown table, without the columns that no row has a value for."""
    rows = list(rows)
    columns = {key: title for key, title in titles.items() if any(row.get(key) is not None for row in rows)}
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---:|" * len(columns)]
    cells = [_column([row[key] for row in rows]) for key in columns]
    lines += ["| " + " | ".join(line) + " |" for line in zip(*cells, strict=True)]
    return "\n".join(lines)


def pivot(
    rows: Iterable[dict[str, Any]],
    down: dict[str, str],
    across: str,
    title: str,
    cell: Callable[[dict[str, Any]], str],
) -> str:
    """A Markdown table with a line for each value of the keys ``down``, and a column for each value of ``across``."""
    rows = list(rows)
    columns = list(dict.fromkeys(row[across] for row in rows))
    cells: dict[tuple[Any, ...], dict[Any, str]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in down), {})[row[across]] = cell(row)
    lines = ["| " + " | ".join([*down.values(), *(f"{title}{value}" for value in columns)]) + " |"]
    lines.append("|" + "---:|" * (len(down) + len(columns)))
    for key, line in cells.items():
        lines.append("| " + " | ".join([*map(str, key), *(line.get(value, "") for value in columns)]) + " |")
    return "\n".join(lines)


def _swap_in_cell(row: dict[str, Any]) -> str:
    parts = [f"{row['us']:.1f}"]
    if row["floor_us"]:
        parts.append(f"+{row['over_floor_us']:.1f}")
    if row["peer_us"] is not None:
        parts.append(f"({row['peer_us']:.1f})")
    return " ".join(parts)


def swap_in_sections(rows: list[dict[str, Any]]) -> list[str]:
    """Tables to read: microseconds, the distance to the floor behind +, a peer's time in brackets; then rates."""
    with_peer = any(row["peer_us"] is not None for row in rows)
    explained = "us per call, `+` the distance to the plain copy of the same items in the same run" + (
        ", in brackets the peer" if with_peer else ""
    )
    text = []
    for state, host_order in dict.fromkeys((row["state"], row["host_order"]) for row in rows):
        part = [row for row in rows if (row["state"], row["host_order"]) == (state, host_order)]
        text.append(f"### Swap-in: {state} tables, {host_order} host order\n\n{explained}.")
        for miss in dict.fromkeys(row["miss_rate"] for row in part):
            chosen = sorted(
                (row for row in part if row["miss_rate"] == miss),
                key=lambda row: (row["hot_buffer_size"], row["item_size_bytes"], row["batch"]),
            )
            down = {"hot_buffer_size": "H", "item_size_bytes": "item"}
            heading = f"{miss:.1%} misses" if miss else "All hits"
            text.append(f"{heading}\n\n{pivot(chosen, down, 'batch', 'B=', _swap_in_cell)}")
    most = max((row["miss_rate"] for row in rows), default=0.0)
    batch = max((row["batch"] for row in rows), default=0)
    if most > 0:
        chosen = [row for row in rows if row["miss_rate"] == most and row["batch"] == batch]
        down = {"state": "state", "host_order": "host", "hot_buffer_size": "H"}
        rates = pivot(
            chosen,
            down,
            "item_size_bytes",
            "item ",
            lambda row: f"{row['gb_per_s']:.1f} of {row['ceiling_gb_per_s']:.1f} ({row['share_of_ceiling']:.1%})",
        )
        text.append(f"### Swap-in: rates\n\nGB/s of the gather ceiling, B={batch}, {most:.0%} misses.\n\n{rates}")
    return text


def kvcacheio_sections(rows: list[dict[str, Any]]) -> list[str]:
    """Tables to read: GB/s for many items, microseconds for few, a peer's in brackets."""

    def rate(row: dict[str, Any]) -> str:
        peer = "" if row["peer_gb_per_s"] is None else f" ({row['peer_gb_per_s']:.1f})"
        return f"{row['gb_per_s']:.1f}{peer}"

    def us(row: dict[str, Any]) -> str:
        peer = "" if row["peer_us"] is None else f" ({row['peer_us']:.1f})"
        return f"{row['us']:.1f}{peer}"

    text = []
    for items in dict.fromkeys(row["items"] for row in rows):
        many = items >= 4096
        chosen = [row | {"ceiling": f"{row['ceiling_gb_per_s']:.1f}"} for row in rows if row["items"] == items]
        down = {"op": "op", "direction": "direction", "item_size_bytes": "item"} | (
            {"ceiling": "ceiling"} if many else {}
        )
        unit = "GB/s, with the ceiling of a plain copy" if many else "us"
        table = pivot(chosen, down, "block_quota", "quota ", rate if many else us)
        peer = ", in brackets the peer" if any(row["peer_us"] is not None for row in chosen) else ""
        text.append(f"### Transfers of {items:,} items\n\n{unit}{peer}.\n\n{table}")
    return text


def footprint_section(rows: list[dict[str, Any]]) -> str:
    down = {"memory": "host memory", "op": "op", "item_size_bytes": "item", "block_quota": "quota"}
    rows = sorted(rows, key=lambda row: (row["item_size_bytes"], row["block_quota"], row["memory"], row["op"]))
    table = pivot(rows, down, "megabytes", "MiB ", lambda row: f"{row['gb_per_s']:.1f}")
    return f"### Transfers from the host by footprint\n\nGB/s.\n\n{table}"


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
        "device": torch.cuda.get_device_name() if device() == "cuda" else "CPU target, by the clock",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hisparse": hisparse.__version__,
        "commit": commit,
    }


def write_json(path: Path, **parts: Any) -> None:
    path.write_text(json.dumps({"machine": machine()} | parts, indent=1) + "\n")
