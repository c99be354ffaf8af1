"""Where the drivers' libraries are looked for: in the documented order, by the documented names, and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from driver_fixtures import KINDS

import hisparse

PACKAGE = Path(hisparse.__file__).resolve().parent
VARIABLES = {"cuda": "HISPARSE_CUDA_LIBRARY", "hip": "HISPARSE_HIP_LIBRARY"}
SYSTEM_NAMES = {
    "cuda": ["libcuda.so.1"],
    "hip": ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"],
}
LOOK = """
import json
from hisparse import _C
(found,) = (target for target in _C.targets() if target["target"] == {target!r})
print(json.dumps([found["library"], found["unavailable"]]))
"""


def look(kind: str, before: str = "", package: Path = PACKAGE, **environment: str) -> tuple[str | None, str | None]:
    """The library that is loaded, or why there is none, with nothing of either vendor on the loader's own path."""
    clean = {name: value for name, value in os.environ.items() if name not in (*VARIABLES.values(), "LD_LIBRARY_PATH")}
    code = textwrap.dedent(before) + LOOK.format(target=KINDS[kind][0])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(package.parent), **environment},
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.fixture
def libraries(kind, build_driver, tmp_path):
    """Puts the fake driver under a name into a folder of its own."""

    def put(folder: str, name: str) -> Path:
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(build_driver(kind), path)
        return path

    return put


@pytest.fixture
def installed(tmp_path):
    """The package in a folder of packages of its own."""
    packages = tmp_path / "packages"
    shutil.copytree(PACKAGE, packages / "hisparse", ignore=shutil.ignore_patterns("__pycache__"))
    return packages / "hisparse"


def test_the_system_is_asked_by_name_in_order(kind):
    library, unavailable = look(kind)
    if library is not None:
        pytest.skip(f"this machine has {library}")
    tried = [part.split(": cannot open")[0].split(": ")[-1] for part in unavailable.split("; ")]
    assert tried == SYSTEM_NAMES[kind], unavailable


def test_each_name_of_the_system_works_and_the_first_one_counts(kind, libraries):
    for count in range(1, len(SYSTEM_NAMES[kind]) + 1):
        there = [libraries(f"system{count}", name) for name in SYSTEM_NAMES[kind][-count:]]
        library, _ = look(kind, LD_LIBRARY_PATH=str(there[0].parent))
        assert library == str(there[0])


def test_other_names_are_not_looked_for(kind, libraries):
    for name in ("libcuda.so", "libcuda.so.2", "libamdhip64.so.5", "libamdhip64.so.8", "libhip.so"):
        folder = libraries("others", name).parent
    library, unavailable = look(kind, LD_LIBRARY_PATH=str(folder))
    if library is not None and not library.startswith(str(folder)):
        pytest.skip(f"this machine has {library}")
    assert library is None and unavailable.startswith("no ")


def test_a_pin_is_the_only_place(kind, libraries):
    pinned = libraries("pinned", "any_name")
    system = libraries("system", SYSTEM_NAMES[kind][0]).parent
    library, _ = look(kind, **{VARIABLES[kind]: str(pinned), "LD_LIBRARY_PATH": str(system)})
    assert library == str(pinned)
    library, unavailable = look(kind, **{VARIABLES[kind]: "/nowhere/driver.so", "LD_LIBRARY_PATH": str(system)})
    assert library is None and "/nowhere/driver.so" in unavailable and ";" not in unavailable
    library, _ = look(kind, **{VARIABLES[kind]: "", "LD_LIBRARY_PATH": str(system)})
    assert library == str(system / SYSTEM_NAMES[kind][0])  # empty is unset


def test_hip_takes_the_copy_that_is_loaded_then_the_sdk_s(kind, libraries, installed):
    if kind == "cuda":
        pytest.skip("CUDA's driver is in one place")
    system = str(libraries("system", "libamdhip64.so.7").parent)
    seven, six = (libraries("packages/_rocm_sdk_core/lib", f"libamdhip64.so.{n}") for n in (7, 6))
    assert look(kind, package=installed, LD_LIBRARY_PATH=system)[0] == str(seven)
    seven.unlink()
    assert look(kind, package=installed, LD_LIBRARY_PATH=system)[0] == str(six)
    loaded = libraries("framework", "libamdhip64.so.6")
    before = f"import ctypes; ctypes.CDLL({str(loaded)!r})"
    assert look(kind, before, package=installed, LD_LIBRARY_PATH=system)[0] == str(loaded)
    pinned = libraries("pinned", "any_name")
    assert look(kind, before, package=installed, **{VARIABLES[kind]: str(pinned)})[0] == str(pinned)


def test_the_current_folder_is_no_place_to_look(kind, libraries):
    folder = libraries("current", SYSTEM_NAMES[kind][0]).parent
    library, _ = look(kind, f"import os; os.chdir({str(folder)!r})")
    assert library is None or not library.startswith(str(folder))
