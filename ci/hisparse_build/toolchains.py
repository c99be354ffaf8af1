"""Finds the compilers of the targets."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .matrix import ROCM_ARCHS, BuildError, MissingToolchain


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str
    archs: frozenset[str] = frozenset()  # what it can compile for


def toolchains_folder(root: Path) -> Path:
    """Where ci/setup_toolchains.py puts the compilers from PyPI: HISPARSE_TOOLCHAINS, or .toolchains in the tree."""
    return Path(os.environ.get("HISPARSE_TOOLCHAINS") or root / ".toolchains")


def _run(*command: str) -> str:
    """What the command prints, or "" where it fails."""
    try:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, text=True, check=True, **streams).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def _programs(names: tuple[str, ...], variables: tuple[str, ...], usual: str) -> Iterator[str]:
    """Where a compiler may be: folders that environment variables name, PATH, then the vendor's usual folder."""
    for variable in variables:
        if os.environ.get(variable):
            yield from (str(Path(os.environ[variable], "bin", name)) for name in names)
    for name in names:
        if found := shutil.which(name):
            yield found
    yield from (str(Path(usual, "bin", name)) for name in names)


def find_cxx() -> Compiler:
    """The host's C++ compiler: $CXX, or g++."""
    command = tuple(shlex.split(os.environ.get("CXX") or "g++"))
    version = _run(*command, "--version")
    if not version:
        raise BuildError(
            f"no C++ compiler: {shlex.join(command)!r} does not run. Install g++ (Debian: apt-get install g++) "
            "or name a compiler in CXX"
        )
    return Compiler(command, version.splitlines()[0])


def _nvcc(programs: Iterable[str]) -> Compiler | None:
    for program in programs:
        if release := re.search(r"release .*V(\S+)", _run(program, "--version")):
            archs = (_run(program, "--list-gpu-code") + _run(program, "--list-gpu-arch")).split()
            return Compiler((program,), f"nvcc {release[1]}", frozenset(archs))
    return None


def system_nvcc() -> Compiler | None:
    return _nvcc(_programs(("nvcc",), ("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda"))


def find_nvcc(root: Path) -> Compiler:
    compiler = system_nvcc() or _nvcc([str(toolchains_folder(root) / "cuda" / "bin" / "nvcc")])
    if compiler is None:
        raise MissingToolchain(
            "no nvcc: it is neither in CUDA_HOME, CUDA_PATH, PATH nor /usr/local/cuda, "
            "and ci/setup_toolchains.py has set up none"
        )
    return compiler


def _rocm_compiler(programs: Iterable[str]) -> Compiler | None:
    for program in programs:
        if release := re.search(r".*clang version.*", _run(program, "--version")):
            cpus = _run(program, "-print-supported-cpus", "-target", "amdgcn-amd-amdhsa", "-nogpulib")
            return Compiler((program,), release[0], frozenset(re.findall(r"\bgfx\w+", cpus) or ROCM_ARCHS))
    return None


def system_rocm_compiler() -> Compiler | None:
    return _rocm_compiler(_programs(("amdclang++", "hipcc"), ("ROCM_PATH", "HIP_PATH"), "/opt/rocm"))


def find_rocm_compiler(root: Path) -> Compiler:
    # hipify is torch's, and a build that pip isolates sees only the build requirements.
    if importlib.util.find_spec("torch") is None:
        raise MissingToolchain(
            "no torch, whose hipify translates the kernels, in the build's environment: "
            "install torch and build with --no-build-isolation"
        )
    compiler = system_rocm_compiler() or _rocm_compiler([str(toolchains_folder(root) / "hip" / "bin" / "amdclang++")])
    if compiler is None:
        raise MissingToolchain(
            "no amdclang++ or hipcc: they are neither in ROCM_PATH, HIP_PATH, PATH nor /opt/rocm, "
            "and ci/setup_toolchains.py has set up none"
        )
    return compiler
