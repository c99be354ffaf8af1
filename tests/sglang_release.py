"""sglang's release as ci/setup_sglang.py unpacks it: some modules of it are run as they are, the rest is stood in for.

`sglang` itself imports most of a serving stack. Here every module that is not named to be real is a stand-in: any
attribute of it is a class that can be derived from, called, or used as a decorator. So a real module runs, whatever it
imports, and what it does with a stand-in does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hisparse_build.toolchains import toolchains_folder

ROOT = Path(__file__).resolve().parents[1]
FOLDER = toolchains_folder(ROOT) / "sglang" / "wheels"
HISPARSE = "sglang.kernels.ops.kvcache.hisparse"
SLOT_MAPPING = "sglang.kernels.ops.kvcache.hisparse_slot_mapping"
COORDINATOR = "sglang.srt.managers.hisparse_coordinator"
MEMORY_POOL = "sglang.srt.mem_cache.hisparse_memory_pool"
HOST_POOL = "sglang.srt.mem_cache.memory_pool_host"
LATENT_HOST_POOL = "sglang.srt.mem_cache.pool_host.mla"
PLUGINS = "sglang.srt.plugins"
REAL = (
    HISPARSE,
    SLOT_MAPPING,
    COORDINATOR,
    MEMORY_POOL,
    HOST_POOL,
    LATENT_HOST_POOL,
    PLUGINS,
    f"{PLUGINS}.hook_registry",
)
# Installed beside sglang, but maybe not beside these tests.
OTHERS = ("triton", "msgspec", "tvm_ffi")


class Compiled(Exception):
    """sglang's own op was called, and would compile its kernel."""


class StandIn:
    """What a stand-in module has under any name."""

    def __new__(cls, *arguments, **options):
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if is_decorator else super().__new__(cls)

    def __init__(self, *arguments, **options):
        pass

    def __init_subclass__(cls, **options):
        pass

    def __getattr__(self, name):
        return StandIn


def _load_jit(*arguments, **options):
    raise Compiled(arguments[0])


GIVEN = {
    "sglang.srt.utils": {
        "is_cuda": lambda: True,
        **dict.fromkeys(("is_hip", "is_npu", "is_xpu", "is_mps"), lambda: False),
        "get_device_module": lambda: torch.cuda,
    },
    "sglang.kernels.jit.utils": {"load_jit": _load_jit, "make_cpp_args": lambda *arguments: arguments},
    "sglang.srt.layers.dcp.layout": {"maybe_dcp_kernel_indices": lambda indices, *_: indices},
}


class Release(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `sglang`: those of REAL in the release, the others as stand-ins."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        package = fullname.partition(".")[0]
        if package in OTHERS and importlib.machinery.PathFinder.find_spec(package) is None:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if package != "sglang":
            return None
        if fullname not in REAL:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        file = FOLDER.joinpath(*fullname.split("."))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        return importlib.util.spec_from_file_location(fullname, file)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(GIVEN.get(module.__name__, {}))

        def attribute(name: str):
            if name.startswith("__"):
                raise AttributeError(name)
            return vars(module).setdefault(name, type(name, (StandIn,), {"__module__": module.__name__}))

        module.__getattr__ = attribute


def write_kernel_package(folder: Path, version: str) -> None:
    """`sgl_kernel` with the functions of sglang-kernel's kvcacheio, which do nothing but say that they were called."""
    upstream = json.loads((ROOT / "tests" / "data" / "upstream_signatures.json").read_text())
    source = ["class Called(Exception):\n    pass\n"]
    for name, parameters in upstream["sgl_kernel.kvcacheio"]["functions"].items():
        texts = []
        for parameter in parameters:
            default = parameter.get("default", "")
            default = default["cuda"] if isinstance(default, dict) else default
            texts.append(parameter["name"] + (f"={default}" if "default" in parameter else ""))
        source.append(f"def {name}({', '.join(texts)}):\n    raise Called({name!r})\n")
    package = folder / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("from sgl_kernel.kvcacheio import transfer_kv_all_layer_mla\n")
    (package / "kvcacheio.py").write_text("\n".join(source))
    write_metadata(folder, "sglang-kernel", version)


def write_metadata(folder: Path, name: str, version: str) -> None:
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """sglang's release and the packages in `folder` can be imported; afterwards it is as if they never were."""
    release, path = Release(), list(sys.path)
    sys.meta_path.insert(0, release)
    sys.path[:0] = [str(folder), str(FOLDER)]
    try:
        yield
    finally:
        sys.meta_path.remove(release)
        sys.path[:] = path
        for name in list(sys.modules):
            if (
                name.partition(".")[0] in ("sglang", "sgl_kernel")
                or getattr(getattr(sys.modules[name], "__spec__", None), "loader", None) is release
            ):
                del sys.modules[name]


def imported(*names: str) -> list[ModuleType]:
    return [importlib.import_module(name) for name in names]


NEEDED = pytest.mark.skipif(
    not FOLDER.is_dir() or sys.version_info < (3, 11),
    reason="sglang's release is for Python 3.11, and python ci/setup_sglang.py gets it",
)
