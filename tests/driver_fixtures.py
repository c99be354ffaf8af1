"""Fixtures for tests in a process of its own, with a fake driver in the real one's place and a stand-in for torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hisparse

TESTS = Path(__file__).resolve().parent
KINDS = {"cuda": ("cuda", "CUDA"), "hip": ("rocm", "ROCm")}
PRELUDE = """
from fake_gpu import *
driver = Driver()
call_op = hisparse.load_cache_to_device_buffer_mla
"""


@pytest.fixture(scope="session")
def build_driver(tmp_path_factory):
    built = {}

    def build(kind: str, *defines: str) -> Path:
        key = (kind, *defines)
        if key not in built:
            path = tmp_path_factory.mktemp("driver") / f"libfake_{kind}.so"
            flags = [f"-D{define}" for define in (*defines, *(["FAKE_HIP"] if kind == "hip" else []))]
            compiler = os.environ.get("CXX", "g++").split()
            if shutil.which(compiler[0]) is None:
                pytest.skip(f"no C++ compiler {compiler[0]}")
            source = TESTS / "fake_driver.cpp"
            subprocess.run([*compiler, "-std=c++17", "-shared", "-fPIC", *flags, source, "-o", path], check=True)
            built[key] = path
        return built[key]

    return build


@pytest.fixture(params=KINDS)
def kind(request):
    if KINDS[request.param][0] not in hisparse.build_info()["targets"]:
        pytest.skip(f"built without the {KINDS[request.param][1]} target")
    return request.param


@pytest.fixture
def run(kind, build_driver):
    def run(script: str, *defines: str, library: str | None = None) -> None:
        path = str(library or build_driver(kind, *defines))
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(hisparse.__file__).parent.parent),
            "FAKE_KIND": kind,
            "HISPARSE_CUDA_LIBRARY": "/nowhere/libdriver.so",
            "HISPARSE_HIP_LIBRARY": "/nowhere/libdriver.so",
            f"HISPARSE_{kind.upper()}_LIBRARY": path,
        }
        code = (PRELUDE if library is None else "") + textwrap.dedent(script)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=TESTS, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr

    return run
