"""Differential fuzzing without an end: random calls against the references, for as long as one likes.

    python tests/fuzz.py --examples 100000 --jobs 8
    python tests/fuzz.py --examples 100000 --place gpu

Prints one line of JSON with what was run. A failure is shrunk first, and printed as the test that repeats it.
The same strategies run as tests in test_fuzz.py.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import sys
import time
import traceback

import hypothesis
from fuzz_calls import SEEDS, STRATEGIES, Example
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from places import CPU_PLACES, has_gpu, torch

CPU_NAMES = tuple(name for name in CPU_PLACES if torch is not None or name.endswith("numpy"))
QUIET = [HealthCheck.data_too_large, HealthCheck.too_slow, HealthCheck.large_base_example]


def examples_of(kind: str, total: int) -> int:
    return max(1, round(total * STRATEGIES[kind][1] / 100))


def run_kind(kind: str, places: tuple[str, ...], examples: int, seed: int, ran: collections.Counter) -> None:
    """Runs examples of one kind of call. Raises what the smallest failing one raises, with the test that repeats it."""
    smallest: list[Example] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=QUIET,
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(st.sampled_from(places), SEEDS, STRATEGIES[kind][0])
    def run(place, schedule, call):
        example = Example(place, schedule, call)
        ran[kind, place] += 1
        ran["calls"] += call.calls
        try:
            example.check()
        except BaseException:
            smallest[:] = [example]
            raise

    try:
        run()
    except Exception as error:
        if not smallest:
            raise
        raise AssertionError(f"{error}\n\n{as_test(smallest[0])}") from error


def as_test(example: Example) -> str:
    return f"from fuzz_calls import *\n\n\ndef test_found_by_fuzzing():\n    {example!r}.check()\n"


def _job(arguments) -> tuple[collections.Counter, str | None]:
    kinds, places, examples, seed = arguments
    ran: collections.Counter = collections.Counter()
    try:
        for kind in kinds:
            run_kind(kind, places, examples_of(kind, examples), seed, ran)
    except Exception:
        return ran, traceback.format_exc()
    return ran, None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=None, help="of the random examples; unset: another one each time")
    parser.add_argument("--place", choices=[*CPU_NAMES, "gpu"], action="append", help="default: all of the CPU target")
    parser.add_argument("--kind", choices=list(STRATEGIES), action="append", help="default: all")
    args = parser.parse_args(argv)
    places = tuple(args.place or CPU_NAMES)
    if "gpu" in places and not has_gpu():
        parser.error("--place gpu needs a GPU that torch can use")
    seed = args.seed if args.seed is not None else time.time_ns() % 2**32

    # Small portions: a failure ends the run soon, and the processes stay small.
    portion = 2000
    portions = [min(portion, args.examples - n) for n in range(0, args.examples, portion)]
    work = [(args.kind or list(STRATEGIES), places, n, seed + i) for i, n in enumerate(portions)]
    ran: collections.Counter = collections.Counter()
    started = time.monotonic()
    failure = None
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for counted, failure in pool.imap_unordered(_job, work):
            ran += counted
            done = sum(n for key, n in ran.items() if key != "calls")
            print(f"{done} of {args.examples} examples", file=sys.stderr, flush=True)
            if failure is not None:
                print(failure)
                break
    calls = ran.pop("calls", 0)
    by_kind, by_place = collections.Counter(), collections.Counter()
    for (kind, place), n in ran.items():
        by_kind[kind] += n
        by_place[place] += n
    report = {
        "examples": sum(by_kind.values()),
        "calls": calls,
        "failed": failure is not None,
        "seed": seed,
        "seconds": round(time.monotonic() - started),
        "by_kind": dict(sorted(by_kind.items())),
        "by_place": dict(sorted(by_place.items())),
    }
    print(json.dumps(report))
    return failure is not None


if __name__ == "__main__":
    sys.exit(main())
