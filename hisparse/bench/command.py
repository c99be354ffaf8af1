"""Times the swap-in on the current GPU, in a graph, against the plain copy of the same items.

Every row is measured with the copy's floor, the gather ceiling and, with --peer MODULE, a module of the same function
names in the same run.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hisparse.progress import progress

from . import report, swap_in

SUMMARY = "time the swap-in on this machine's GPU"


def _numbers(kind: type) -> Callable[[str], tuple[float, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hot-buffers", type=_numbers(int), default=swap_in.HOT_BUFFERS, metavar="H,H,...")
    parser.add_argument("--item-sizes", type=_numbers(int), default=swap_in.ITEM_SIZES, metavar="BYTES,...")
    parser.add_argument("--miss-rates", type=_numbers(float), default=swap_in.MISS_RATES, metavar="RATE,...")
    parser.add_argument("--batches", type=_numbers(int), default=swap_in.BATCHES, metavar="B,B,...")
    parser.add_argument("--states", choices=["shuffled", "ordered", "both"], default="both")
    parser.add_argument("--peer", metavar="MODULE", help="a module with the same function names")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop measuring after so many seconds")
    parser.add_argument("--out", type=Path, help="folder for swap_in.json, swap_in.md and swap_in.png")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        import torch
    except ImportError:
        parser.error("the benchmark needs torch")
    if not torch.cuda.is_available():
        parser.error("the benchmark needs a GPU that torch can use")
    states = {"shuffled": (False,), "ordered": (True,), "both": (False, True)}[args.states]
    cases = swap_in.all_cases(args.hot_buffers, args.item_sizes, args.miss_rates, args.batches, states)
    peer = importlib.import_module(args.peer) if args.peer else None
    stop_at = time.monotonic() + args.limit_s

    def until_the_limit(all_cases: list[swap_in.Case]) -> Iterator[swap_in.Case]:
        for case in progress(all_cases, "measuring"):
            if time.monotonic() > stop_at:
                return
            yield case

    rows = [row.as_dict() for row in swap_in.measure(cases, peer, until_the_limit)]
    tables = [
        f"{'Ordered' if ordered else 'Shuffled'} state\n\n{report.table(part)}"
        for ordered in states
        if (part := [row for row in rows if row["ordered"] == ordered])
    ]
    print(report.machine())
    print("\n\n".join(tables))
    if len(rows) < len(cases):
        print(f"\nStopped at the limit, after {len(rows)} of {len(cases)} cases.")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        report.write_json(args.out / "swap_in.json", rows)
        (args.out / "swap_in.md").write_text("\n\n".join(tables) + "\n")
        if not all(row["ordered"] for row in rows):
            report.plot(args.out / "swap_in.png", rows)
    return 0
