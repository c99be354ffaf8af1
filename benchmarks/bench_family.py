"""python benchmarks/bench_family.py --out FILE: times the swap-in's relatives on the current GPU."""

import argparse

from hisparse.bench import family

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=family.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    family.add_arguments(parser)
    raise SystemExit(family.run(parser.parse_args()))
