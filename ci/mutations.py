#!/usr/bin/env python3
"""Makes each mistake of ci/mutation_list.py in a copy of the tree, builds it, and shows what notices.

    python3 ci/mutations.py [--jobs N] [--only TEXT] [--quick] [--without-isa] [--seconds N]

Needs what ci/test.sh installs: compilers and disassemblers for those mistakes that only the compiled code of a GPU
shows. First the tree itself has to pass. Prints a line per mistake as it is noticed, then a summary; exits with 1 where
one was not noticed or could not be made.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mutation_list import ROOT, Mutation, mutations

COPIED = ("ci", "hisparse", "kernels", "tests", "pyproject.toml", "setup.py", "README.md", "LICENSE")
EXAMPLES = "400"  # of the fuzzer, which comes first


@dataclass
class Outcome:
    mutation: Mutation
    noticed_by: str  # a test, a rule of the ISA gate, or "" where nothing noticed
    seconds: float
    log: str = ""


class Copy:
    """A copy of the tree with a build of its own, in which one mistake at a time is made."""

    def __init__(self, folder: Path, most_seconds: float):
        self.folder, self.most_seconds = folder, most_seconds
        folder.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                ignored = shutil.ignore_patterns("*.so", "__pycache__", ".hypothesis")
                # As of now: an earlier run may have left an object of a wrong file, younger than its source.
                shutil.copytree(source, target, ignore=ignored, copy_function=shutil.copy)
            else:
                shutil.copy(source, target)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        toolchains = os.environ.get("HISPARSE_TOOLCHAINS") or str(ROOT / ".toolchains")
        environment = {**os.environ, "HISPARSE_TOOLCHAINS": toolchains, "PYTHONDONTWRITEBYTECODE": "1", **variables}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment.pop("HISPARSE_SANITIZE", None)
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.most_seconds,
        )

    def build(self, arch: str = "") -> None:
        # A third of the time of -O3. Misaligned accesses, which x86 puts up with, are crashes.
        flags = "-O1 -fsanitize=alignment -fsanitize-undefined-trap-on-error"
        variables = {"HISPARSE_TARGETS": "cpu", "MAX_JOBS": "2", "CXXFLAGS": flags}
        if arch.startswith("gfx"):
            variables |= {"HISPARSE_TARGETS": "cpu;rocm", "PYTORCH_ROCM_ARCH": arch}
        elif arch:
            variables |= {"HISPARSE_TARGETS": "cpu;cuda", "TORCH_CUDA_ARCH_LIST": f"{arch[3:-1]}.{arch[-1]}"}
        built = self.run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", **variables)
        if built.returncode != 0:
            raise RuntimeError(f"does not build:\n{built.stdout[-3000:]}")

    def test(self, mutation: Mutation) -> tuple[str, str]:
        """What notices, and what it printed. RuntimeError where there is no answer."""
        if mutation.arch:
            gate = self.run(sys.executable, "ci/isa_gate.py", *map(str, (self.folder / "hisparse").glob("_C*.so")))
            broken = f"{mutation.rule}: " in gate.stdout and gate.returncode == 1
            return f"ISA gate, {mutation.rule}" if broken else "", gate.stdout
        files = [f"tests/{name}" for name in mutation.tests]
        options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu", "--tb=short")
        try:
            tests = self.run(sys.executable, "-m", "pytest", *options, *files, HISPARSE_TEST_EXAMPLES=EXAMPLES)
        except subprocess.TimeoutExpired:
            return "a test that does not end", ""
        if tests.returncode < 0:
            return f"a crash ({tests.returncode})", tests.stdout
        failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", tests.stdout, re.MULTILINE)
        if tests.returncode == 1 and failed:
            return failed[1], tests.stdout
        if tests.returncode != 0 or "passed" not in tests.stdout:
            raise RuntimeError(tests.stdout)
        return "", tests.stdout

    def outcome(self, mutation: Mutation) -> Outcome:
        started = time.monotonic()
        path = self.folder / mutation.file
        right = path.read_text()
        if mutation.before:
            path.write_text(mutation.apply(right))
        try:
            self.build(mutation.arch)
            noticed_by, log = self.test(mutation)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            noticed_by, log = "", str(error)
        finally:
            path.write_text(right)
        return Outcome(mutation, noticed_by, time.monotonic() - started, log)


def unchanged(chosen: list[Mutation]) -> list[Mutation]:
    """No mistakes, to be noticed by nothing: each test file, and each architecture's ISA gate."""
    tests = sorted({name for mutation in chosen if not mutation.arch for name in mutation.tests})
    archs = sorted({mutation.arch for mutation in chosen if mutation.arch})
    file = chosen[0].file
    return [
        *(Mutation("none", file, "", "", tests=(name,)) for name in tests),
        *(Mutation("none", file, "", "", arch=arch, rule="ISA gate") for arch in archs),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--only", metavar="TEXT", help="mistakes whose name or file holds this")
    parser.add_argument("--quick", action="store_true", help="the few that ci/test.sh makes")
    parser.add_argument("--without-isa", action="store_true", help="none that needs compilers for GPUs")
    parser.add_argument("--seconds", type=float, default=600, help="the most that a build, or tests, may take")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in mutations()
        if (not options.only or options.only in f"{mutation.file} {mutation.name}")
        and (mutation.quick or not options.quick)
        and not (mutation.arch and options.without_isa)
    ]
    if not chosen:
        parser.error("no such mistake")
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for n in range(options.jobs):
        copies.put(Copy(ROOT / "build" / "mutations" / str(n), options.seconds))

    def outcome(mutation: Mutation) -> Outcome:
        copy = copies.get()
        try:
            return copy.outcome(mutation)
        finally:
            copies.put(copy)

    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(outcome, unchanged(chosen)):
            if result.noticed_by or "passed" not in result.log:
                pool.shutdown(wait=False, cancel_futures=True)
                raise SystemExit(f"the tree itself fails, by {result.noticed_by or 'itself'}:\n{result.log[-3000:]}")
        for future in concurrent.futures.as_completed([pool.submit(outcome, mutation) for mutation in chosen]):
            result = future.result()
            outcomes.append(result)
            print(
                f"{result.noticed_by or 'NOT NOTICED':70} {result.seconds:4.0f} s  {result.mutation.name}", flush=True
            )
    missed = [result for result in outcomes if not result.noticed_by]
    for result in missed:
        print(f"\n{result.mutation.name} ({result.mutation.file}) was not noticed:\n{result.log[-2000:]}")
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} mistakes noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
