"""Fixtures: the places that an op test runs at, and a random generator that depends on the test's name alone.

The CPU target covers warp width, item copy and array library pairwise in four places; sweeps run at one place a width.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from driver_fixtures import build_driver, kind, run  # noqa: F401
from places import has_gpu, make_place, torch

EVERYWHERE = ("cpu64-wave-numpy", "cpu64-chunk-torch", "cpu32-wave-torch", "cpu32-chunk-numpy", "gpu")
ONE_A_WIDTH = ("cpu64-wave-numpy", "cpu32-chunk-numpy", "gpu")


def pytest_collection_modifyitems(items):
    if has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device"))


def _params(names):
    for name in names:
        if name == "gpu":
            yield pytest.param(name, marks=pytest.mark.gpu)
        elif name.endswith("torch") and torch is None:
            yield pytest.param(name, marks=pytest.mark.skip(reason="torch is not installed"))
        else:
            yield name


@pytest.fixture(params=_params(EVERYWHERE))
def place(request):
    return make_place(request.param)


@pytest.fixture(params=_params(ONE_A_WIDTH))
def sweep_place(request):
    return make_place(request.param)


@pytest.fixture(params=_params(name for name in EVERYWHERE if not name.endswith("numpy")))
def torch_place(request):
    return make_place(request.param)


@pytest.fixture(params=_params(ONE_A_WIDTH[:2]))
def cpu_place(request):
    return make_place(request.param)


@pytest.fixture
def release(tmp_path, monkeypatch):
    """sglang's release can be imported, and an sgl_kernel in the folder that this is."""
    import sglang_release

    import hisparse
    from hisparse.integrations import sglang

    if torch.version.cuda and "cuda" not in hisparse.build_info()["targets"]:
        monkeypatch.setattr(torch.version, "cuda", None)  # for another target ops are left, which has tests of its own
    sglang_release.write_kernel_package(tmp_path, "0.4.10")
    with sglang_release.beside(tmp_path):
        yield tmp_path
        sglang.uninstall()


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
