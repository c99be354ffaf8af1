"""Times the swap-in on the current device, beside the plain copy of the same items and one block per request.

On a GPU in a graph, with the reset of the tables taken off; without a GPU, the CPU target by the clock, on a small
selection. Each row has the copy's floor and the gather ceiling of the same run; --peer times another module of the
same function names in turns with ours. What the rows say about the project's targets comes last.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hisparse.progress import progress

from . import host_side, plots, report, swap_in, switches, targets
from .report import counted
from .timing import device

SUMMARY = "time the swap-in on this machine"

Step = TypeVar("Step")

FULL = {
    "hot_buffers": swap_in.HOT_BUFFERS,
    "item_sizes": swap_in.ITEM_SIZES,
    "miss_rates": swap_in.MISS_RATES,
    "batches": swap_in.BATCHES,
    "states": swap_in.STATES,
    "host_orders": swap_in.HOST_ORDERS,
}
QUICK = {
    "hot_buffers": (4096, 8192),
    "item_sizes": (512, 656, 1152),
    "miss_rates": (0.2, 0.001, 0.0),
    "batches": (1, 10, 100),
    "states": ("shuffled",),
    "host_orders": ("random",),
}
ON_CPU = QUICK | {"hot_buffers": (4096,), "item_sizes": (512, 656), "miss_rates": (0.2, 0.0), "batches": (1, 4)}


def listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def load_peer(name: str) -> ModuleType:
    """A module by its name, or by the path of its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ModuleNotFoundError(f"no module at {path}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # for what stands beside it
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", metavar="MODULE", help="name or file of a module with the same function names")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop measuring after so many seconds")
    parser.add_argument("--out", type=Path, help="folder for JSON, whole tables and plots")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="file for tables to read")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a selection that takes seconds")
    parser.add_argument("--hot-buffers", type=listed(int), metavar="H,H,...")
    parser.add_argument("--item-sizes", type=listed(int), metavar="BYTES,...")
    parser.add_argument("--miss-rates", type=listed(float), metavar="RATE,...")
    parser.add_argument("--batches", type=listed(int), metavar="B,B,...")
    parser.add_argument("--states", type=listed(str), metavar=",".join(swap_in.STATES))
    parser.add_argument("--host-orders", type=listed(str), metavar=",".join(swap_in.HOST_ORDERS))
    parser.add_argument("--switches", action="store_true", help="also time the copy without each of its parts")
    add_common_arguments(parser)


class Limit:
    """Steps with a progress bar, until the time is over."""

    def __init__(self, seconds: float) -> None:
        self.stop_at = time.monotonic() + seconds
        self.left_out = 0

    def __call__(self, steps: Sequence[Step], label: str = "measuring") -> Iterator[Step]:
        for done, step in enumerate(progress(steps, label)):
            if time.monotonic() > self.stop_at:
                self.left_out += len(steps) - done
                return
            yield step

    def __str__(self) -> str:
        was = "was" if self.left_out == 1 else "were"
        return f"Stopped at the limit: {counted(self.left_out, 'row')} {was} not measured." if self.left_out else ""


def prepare(args: argparse.Namespace, parser: argparse.ArgumentParser) -> ModuleType | None:
    """The peer, where there is one. What would stop the measuring at its end stops it here."""
    try:
        import torch  # noqa: F401
    except ImportError:
        parser.error("the benchmark needs torch")
    for folder in (args.out, args.markdown.parent if args.markdown else None):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    try:
        return load_peer(args.peer) if args.peer else None
    except ImportError as error:
        parser.error(f"--peer: {error}")


def publish(
    args: argparse.Namespace,
    name: str,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    readable: list[str],
    remarks: list[str],
    plot: Callable[[Path, list[dict[str, Any]]], None],
    **more: Any,
) -> None:
    """Prints what is to be read, and writes it, the rows and their plot where the arguments say."""
    machine = ", ".join(f"{key} {value}" for key, value in report.machine().items() if value)
    print("\n\n".join(filter(None, [machine, *readable, *remarks])))
    if args.markdown:
        remarks_in_fences = [f"```text\n{remark}\n```" for remark in filter(None, remarks)]
        args.markdown.write_text("\n\n".join([f"{machine}.", *readable, *remarks_in_fences]) + "\n")
    if args.out:
        report.write_json(args.out / f"{name}.json", rows=rows, **more)
        (args.out / f"{name}.md").write_text(report.table(rows, columns) + "\n")
        if rows and plots.can_plot():
            plot(args.out / f"{name}.png", rows)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    peer = prepare(args, parser)
    defaults = ON_CPU if device() == "cpu" else QUICK if args.quick else FULL
    chosen = {name: getattr(args, name) or default for name, default in defaults.items()}
    for name, known in (("states", swap_in.STATES), ("host_orders", swap_in.HOST_ORDERS)):
        if unknown := set(chosen[name]) - set(known):
            parser.error(f"--{name.replace('_', '-')}: {', '.join(unknown)} is none of {', '.join(known)}")
    limit = Limit(args.limit_s)
    rows = [row.as_dict() for row in swap_in.measure(swap_in.all_cases(**chosen), peer, limit)]
    isolated = switches.measure(chosen["item_sizes"], limit) if args.switches else []
    figures = host_side.measure()
    readable = report.swap_in_sections(rows)
    if isolated:
        table = report.table(isolated, switches.COLUMNS)
        readable.append(f"### The item copy without each of its parts\n\n{table}")
    verdicts = [*targets.swap_in_verdicts(rows), *host_side.verdicts(figures)] if device() == "cuda" else []
    publish(
        args,
        "swap_in",
        rows,
        report.SWAP_IN_COLUMNS,
        readable,
        [host_side.text_of(figures), targets.text_of(verdicts), str(limit)],
        plots.plot_swap_in,
        switches=isolated,
        host_side=figures,
    )
    return 0
