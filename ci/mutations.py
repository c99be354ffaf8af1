#!/usr/bin/env python3
"""Makes each mistake of ci/mutation_list.py in a copy of the tree, builds it, and shows what notices.

    python3 ci/mutations.py [--jobs N] [--only TEXT] [--quick] [--without-isa]

Needs what ci/test.sh installs: compilers and disassemblers for those mistakes that only the compiled code of a GPU
shows. Prints a line per mistake, then a summary; exits with 1 where one was not noticed or could not be made.
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
MOST_SECONDS = 600


@dataclass
class Outcome:
    mutation: Mutation
    noticed_by: str  # a test, a rule of the ISA gate, or "" where nothing noticed
    seconds: float
    log: str = ""


class Copy:
    """A copy of the tree with a build of its own, in which one mistake at a time is made."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                ignored = shutil.ignore_patterns("*.so", "__pycache__", ".hypothesis")
                shutil.copytree(source, target, ignore=ignored, copy_function=shutil.copy2)
            else:
                shutil.copy2(source, target)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        toolchains = os.environ.get("HISPARSE_TOOLCHAINS") or str(ROOT / ".toolchains")
        environment = {**os.environ, "HISPARSE_TOOLCHAINS": toolchains, "PYTHONDONTWRITEBYTECODE": "1", **variables}
        environment["PYTHONPATH"] = str(self.folder)
        environment.pop("HISPARSE_SANITIZE", None)
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=MOST_SECONDS,
        )

    def build(self, arch: str = "") -> None:
        variables = {"HISPARSE_TARGETS": "cpu", "MAX_JOBS": "2", "CXXFLAGS": "-O1"}  # a third of the time of -O3
        if arch.startswith("gfx"):
            variables |= {"HISPARSE_TARGETS": "cpu;rocm", "PYTORCH_ROCM_ARCH": arch}
        elif arch:
            variables |= {"HISPARSE_TARGETS": "cpu;cuda", "TORCH_CUDA_ARCH_LIST": f"{arch[3:-1]}.{arch[-1]}"}
        built = self.run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", **variables)
        if built.returncode != 0:
            raise RuntimeError(f"does not build:\n{built.stdout[-3000:]}")

    def test(self, mutation: Mutation) -> tuple[str, str]:
        """What notices, and what it printed."""
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
        failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", tests.stdout, re.MULTILINE)
        if tests.returncode == 1 and failed:
            return failed[1], tests.stdout
        return f"a crash ({tests.returncode})" if tests.returncode < 0 else "", tests.stdout

    def outcome(self, mutation: Mutation) -> Outcome:
        started = time.monotonic()
        path = self.folder / mutation.file
        right = path.read_text()
        path.write_text(mutation.apply(right))
        try:
            self.build(mutation.arch)
            noticed_by, log = self.test(mutation)
        except RuntimeError as error:
            noticed_by, log = "", str(error)
        finally:
            path.write_text(right)
        return Outcome(mutation, noticed_by, time.monotonic() - started, log)

    def check_unchanged(self, chosen: list[Mutation]) -> None:
        """The tree itself passes what the mistakes are to fail."""
        for arch in sorted({mutation.arch for mutation in chosen}):
            files = tuple(sorted({name for m in chosen if m.arch == arch for name in m.tests}))
            try:
                self.build(arch)
            except RuntimeError as error:
                raise SystemExit(f"the tree itself {error}") from error
            noticed_by, log = self.test(Mutation("none", "", "", "", files, arch, "broken rules"))
            if noticed_by or "passed" not in log:
                raise SystemExit(f"the tree itself fails, by {noticed_by or 'itself'}:\n{log[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--only", metavar="TEXT", help="mistakes whose name or file holds this")
    parser.add_argument("--quick", action="store_true", help="the few that ci/test.sh makes")
    parser.add_argument("--without-isa", action="store_true", help="none that needs compilers for GPUs")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in mutations()
        if (not options.only or options.only in f"{mutation.file} {mutation.name}")
        and (mutation.quick or not options.quick)
        and not (mutation.arch and options.without_isa)
    ]
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for n in range(options.jobs):
        copies.put(Copy(ROOT / "build" / "mutations" / str(n)))
    first = copies.get()
    first.check_unchanged(chosen)
    copies.put(first)

    def outcome(mutation: Mutation) -> Outcome:
        copy = copies.get()
        try:
            return copy.outcome(mutation)
        finally:
            copies.put(copy)

    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(outcome, chosen):
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
