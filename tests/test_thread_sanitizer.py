"""ThreadSanitizer sees the threads of the CPU target as a GPU has them: only barriers and arrivals order accesses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests" / "executor_races.cpp"
KERNELS = re.findall(r"HISPARSE_NAMED\((\w+)\),", SOURCE.read_text())
RACES = {
    name: n for n, line in enumerate(SOURCE.read_text().splitlines(), 1) for name in re.findall(r"race in (\w+)", line)
}


@pytest.fixture(scope="session")
def races(tmp_path_factory):
    """Runs a kernel of executor_races.cpp and returns what the process printed."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("races")
    compile_ = [compiler, "-std=c++17", "-O1", "-g", f"-I{ROOT / 'kernels' / 'cpu'}", "-c"]
    # As ci/hisparse_build does: the executor is told of ThreadSanitizer, but not looked at by it.
    executor = [*compile_, "-DHISPARSE_THREAD_SANITIZER", ROOT / "kernels" / "cpu" / "executor.cpp"]
    subprocess.run([*executor, "-o", folder / "executor.o"], check=True)
    subprocess.run([*compile_, "-fsanitize=thread", SOURCE, "-o", folder / "races.o"], check=True)
    objects = [folder / "executor.o", folder / "races.o"]
    linked = subprocess.run(
        [compiler, "-fsanitize=thread", *objects, "-o", folder / "races"], capture_output=True, text=True
    )
    if linked.returncode != 0:
        pytest.skip(f"this g++ has no ThreadSanitizer: {linked.stderr}")
    # Without a fixed layout of addresses, libtsan may find its own taken.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    if fixed and subprocess.run([*fixed, "true"], capture_output=True).returncode != 0:
        fixed = []

    def run(kernel: str) -> subprocess.CompletedProcess:
        return subprocess.run([*fixed, folder / "races", kernel], capture_output=True, text=True, timeout=100)

    return run


@pytest.mark.parametrize("kernel", KERNELS)
def test_exactly_the_races_are_reported(races, kernel):
    done = races(kernel)
    if kernel not in RACES:
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
        return
    assert done.returncode != 0 and done.stdout == "done\n"
    assert "ThreadSanitizer: data race" in done.stderr
    assert f"executor_races.cpp:{RACES[kernel]}" in done.stderr


def test_there_are_kernels_of_both_kinds():
    assert len(RACES) >= 4 and len(set(KERNELS) - set(RACES)) >= 4 and set(RACES) < set(KERNELS)
