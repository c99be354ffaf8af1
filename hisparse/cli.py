"""The `hisparse` command. A subcommand is a module with SUMMARY, add_arguments(parser), run(args, parser) -> int."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import hisparse
from hisparse import demo, info, verify
from hisparse.bench import command as bench
from hisparse.trace import command as trace

COMMANDS = {"demo": demo, "info": info, "verify": verify, "bench": bench, "trace": trace}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hisparse",
        description="Sparse attention over a KV cache in host memory: swap-in ops, checked on real input.",
    )
    parser.add_argument("--version", action="version", version=f"hisparse {hisparse.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, module in COMMANDS.items():
        parsers[name] = subparsers.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parsers[name])
    args = parser.parse_args(argv)
    try:
        status = COMMANDS[args.command].run(args, parsers[args.command])
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, `head` say: no more to write, at the exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # what a shell makes of it
    return status
