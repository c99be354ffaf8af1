"""Times the swap-in on the current GPU: python benchmarks/bench_swap_in.py --out results

Every row is measured with the plain copy of the same items, the gather ceiling and, with --peer MODULE, a module of the
same function names in the same run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hisparse.bench import report, swap_in


def numbers(kind: type) -> object:
    return lambda text: tuple(kind(part) for part in text.split(","))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hot-buffers", type=numbers(int), default=swap_in.HOT_BUFFERS)
    parser.add_argument("--item-sizes", type=numbers(int), default=swap_in.ITEM_SIZES)
    parser.add_argument("--miss-rates", type=numbers(float), default=swap_in.MISS_RATES)
    parser.add_argument("--batches", type=numbers(int), default=swap_in.BATCHES)
    parser.add_argument("--states", choices=["shuffled", "ordered", "both"], default="both")
    parser.add_argument("--peer", metavar="MODULE", help="a module with the same function names")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop measuring after so many seconds")
    parser.add_argument("--out", type=Path, help="folder for swap_in.json, swap_in.md and swap_in.png")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    ordered = {"shuffled": (False,), "ordered": (True,), "both": (False, True)}[options.states]
    cases = swap_in.all_cases(options.hot_buffers, options.item_sizes, options.miss_rates, options.batches, ordered)
    peer = importlib.import_module(options.peer) if options.peer else None
    started = time.monotonic()

    def progress(left: Iterator[swap_in.Case], total: int) -> Iterator[swap_in.Case]:
        for done, case in enumerate(left):
            seconds = time.monotonic() - started
            if seconds > options.limit_s:
                print(f"stopped after {seconds:.0f} s, {done} of {total} cases", file=sys.stderr)
                return
            if sys.stderr.isatty():
                print(f"\r{done}/{total} {seconds:.0f} s", end="", file=sys.stderr)
            yield case

    rows = [row.as_dict() for row in swap_in.measure(cases, peer, progress)]
    text = "\n\n".join(
        f"{'Ordered' if state else 'Shuffled'} state\n\n" + report.table(row for row in rows if row["ordered"] == state)
        for state in ordered
    )
    print(report.machine())
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        report.write_json(options.out / "swap_in.json", rows)
        (options.out / "swap_in.md").write_text(text + "\n")
        report.plot(options.out / "swap_in.png", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
