"""Times the transfers of hisparse.kvcacheio on the current device: python benchmarks/bench_kvcacheio.py --out FOLDER

On a GPU in a graph, else on the CPU target by the clock. Each row has the ceiling of a plain copy of the same run;
--peer times another module of the same function names in turns with ours. --footprints times transfers from the host
against the memory that they are spread over.
"""

from __future__ import annotations

import argparse

from hisparse.bench import footprint, kvcacheio, plots, report, targets
from hisparse.bench.command import Limit, add_common_arguments, listed, prepare, publish
from hisparse.bench.timing import device


def parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=listed(str), default=kvcacheio.OPS, metavar="OP,...")
    parser.add_argument("--directions", type=listed(str), default=kvcacheio.DIRECTIONS, metavar="h2d,d2h")
    parser.add_argument("--item-sizes", type=listed(int), default=kvcacheio.ITEM_SIZES, metavar="BYTES,...")
    parser.add_argument("--items", type=listed(int), default=kvcacheio.ITEMS, metavar="N,...")
    parser.add_argument("--quotas", type=listed(int), default=kvcacheio.QUOTAS, metavar="BLOCKS,...")
    parser.add_argument("--footprints", action="store_true", help="also time layouts and kinds of host memory")
    add_common_arguments(parser)
    return parser.parse_args(), parser


def main() -> int:
    args, parser = parse()
    peer = prepare(args, parser)
    limit = Limit(args.limit_s)
    cases = kvcacheio.all_cases(args.ops, args.directions, args.item_sizes, args.items, args.quotas)
    rows = [row.as_dict() for row in kvcacheio.measure(cases, peer, limit)]
    spread = list(footprint.measure(peer, limit)) if args.footprints else []
    readable = report.kvcacheio_sections(rows)
    if spread:
        readable.append(report.footprint_section(spread))
    verdicts = targets.kvcacheio_verdicts(rows) if device() == "cuda" else []
    publish(
        args,
        "kvcacheio",
        rows,
        kvcacheio.COLUMNS,
        readable,
        [targets.text_of(verdicts), str(limit)],
        plots.plot_kvcacheio,
        footprints=spread,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
