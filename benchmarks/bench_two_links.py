"""The links of several GPUs, each alone and all at once: python benchmarks/bench_two_links.py --out FOLDER

Gathers and swap-ins read from one pool of pinned memory. *kept* is the share of its own rate that a device keeps while
the others are at work too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hisparse.bench import links, report
from hisparse.progress import progress


def listed(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=listed, default=(0, 1), metavar="N,N,...")
    parser.add_argument("--item-sizes", type=listed, default=links.ITEM_SIZES, metavar="BYTES,...")
    parser.add_argument("--out", type=Path, help="folder for links.json and links.md")
    args = parser.parse_args()
    rows = list(links.measure(args.devices, args.item_sizes, lambda cases: progress(cases, "measuring")))
    table = report.table(rows, links.COLUMNS)
    print(report.machine())
    print(table)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        report.write_json(args.out / "links.json", rows=rows)
        (args.out / "links.md").write_text(table + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
