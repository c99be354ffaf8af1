"""Times the transfers of hisparse.kvcacheio on the current GPU: python benchmarks/bench_kvcacheio.py --out FOLDER

Every row is measured in a graph, with the ceiling of a plain copy and, with --peer MODULE, a module of the same
function names in the same run.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hisparse.bench import kvcacheio, report
from hisparse.progress import progress


def listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=listed(str), default=kvcacheio.OPS, metavar="OP,...")
    parser.add_argument("--directions", type=listed(str), default=kvcacheio.DIRECTIONS, metavar="h2d,d2h")
    parser.add_argument("--item-sizes", type=listed(int), default=kvcacheio.ITEM_SIZES, metavar="BYTES,...")
    parser.add_argument("--items", type=listed(int), default=kvcacheio.ITEMS, metavar="N,...")
    parser.add_argument("--quotas", type=listed(int), default=kvcacheio.QUOTAS, metavar="BLOCKS,...")
    parser.add_argument("--peer", metavar="MODULE", help="a module with the same function names")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop measuring after so many seconds")
    parser.add_argument("--out", type=Path, help="folder for kvcacheio.json, kvcacheio.md and kvcacheio.png")
    return parser.parse_args()


def main() -> int:
    args = parse()
    cases = kvcacheio.all_cases(args.ops, args.directions, args.item_sizes, args.items, args.quotas)
    peer = importlib.import_module(args.peer) if args.peer else None
    stop_at = time.monotonic() + args.limit_s

    def until_the_limit(all_cases: list[kvcacheio.Case]) -> Iterator[kvcacheio.Case]:
        for case in progress(all_cases, "measuring"):
            if time.monotonic() > stop_at:
                return
            yield case

    rows = [row.as_dict() for row in kvcacheio.measure(cases, peer, until_the_limit)]
    table = report.table(rows, kvcacheio.COLUMNS)
    print(report.machine())
    print(table)
    if len(rows) < len(cases):
        print(f"\nStopped at the limit, after {len(rows)} of {len(cases)} cases.")
    if args.out and rows:
        args.out.mkdir(parents=True, exist_ok=True)
        report.write_json(args.out / "kvcacheio.json", rows)
        (args.out / "kvcacheio.md").write_text(table + "\n")
        kvcacheio.plot(args.out / "kvcacheio.png", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
