"""python benchmarks/bench_swap_in.py --out FOLDER: the same as `hisparse bench`."""

import argparse

from hisparse.bench import command

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    raise SystemExit(command.run(parser.parse_args(), parser))
