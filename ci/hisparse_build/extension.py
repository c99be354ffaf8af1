"""The build_ext command of setup.py: chooses targets, builds the extension, and says what it has built."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

from .graph import SANITIZERS, Build, DeviceTarget
from .matrix import (
    CUDA_ARCHS,
    ROCM_ARCHS,
    BuildError,
    MissingToolchain,
    cuda_archs,
    demanded_targets,
    rocm_archs,
)
from .toolchains import Compiler, find_cxx, find_nvcc, find_rocm_compiler

ROOT = Path(__file__).resolve().parents[2]


class BuildExtension(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            build, left_out = configure(ROOT, self.distribution.get_version())
            if self.force:
                shutil.rmtree(build.folder, ignore_errors=True)
            build.run()
        except BuildError as error:
            raise CompileError(str(error)) from error
        destination = Path(self.get_ext_fullpath(ext.name))
        destination.parent.mkdir(parents=True, exist_ok=True)
        # A running process may have the old file mapped: replace it, never write into it.
        fresh = destination.with_name(destination.name + ".new")
        shutil.copy(build.extension, fresh)  # with a new time: setuptools copies it on only where it is newer
        fresh.replace(destination)
        print("\n".join(summary(build, left_out)), flush=True)


def configure(root: Path, version: str) -> tuple[Build, dict[str, str]]:
    """The build that the environment asks for, and why each target or default architecture left out of it is."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError("hisparse needs the GIL: a free-threaded Python cannot have it")
    sanitizers = _sanitizers(os.environ.get("HISPARSE_SANITIZE"))
    demanded = demanded_targets(os.environ.get("HISPARSE_TARGETS"))
    targets: dict[str, DeviceTarget | None] = {"cuda": None, "rocm": None}
    left_out: dict[str, str] = {}
    for name, choose in {"cuda": _cuda, "rocm": _rocm}.items():
        if demanded is not None and name not in demanded:
            left_out[name] = "HISPARSE_TARGETS does not name it"
        elif demanded is None and sanitizers:
            left_out[name] = "sanitizers look at the CPU target only"
        else:
            try:
                targets[name], unknown = choose(root)
                left_out.update(unknown)
            except MissingToolchain as missing:
                if demanded is not None:
                    raise BuildError(f"HISPARSE_TARGETS demands {name}, but there is {missing}") from missing
                left_out[name] = str(missing)
    return Build(root, version, find_cxx(), targets["cuda"], targets["rocm"], sanitizers), left_out


def _cuda(root: Path) -> tuple[DeviceTarget, dict[str, str]]:
    return _device_target(find_nvcc(root), cuda_archs, "TORCH_CUDA_ARCH_LIST", CUDA_ARCHS)


def _rocm(root: Path) -> tuple[DeviceTarget, dict[str, str]]:
    return _device_target(find_rocm_compiler(root), rocm_archs, "PYTORCH_ROCM_ARCH", ROCM_ARCHS)


def _device_target(
    compiler: Compiler, choose: Callable[..., list[str]], variable: str, defaults: Iterable[str]
) -> tuple[DeviceTarget, dict[str, str]]:
    chosen = os.environ.get(variable)
    archs = choose(chosen, compiler.archs)
    if not archs:
        raise MissingToolchain(f"no architecture of ci/matrix.json that {compiler.version} knows")
    unknown = [] if chosen else [arch for arch in defaults if arch not in archs]
    return DeviceTarget(compiler, archs), dict.fromkeys(unknown, f"{compiler.version} does not know it")


def _sanitizers(value: str | None) -> tuple[str, ...]:
    names = set((value or "").replace(",", " ").split())
    if unknown := names - set(SANITIZERS):
        raise BuildError(f"HISPARSE_SANITIZE: unknown sanitizer {min(unknown)!r}; known: {', '.join(SANITIZERS)}")
    if {"address", "thread"} <= names:
        raise BuildError("HISPARSE_SANITIZE: address and thread cannot be combined")
    return tuple(sorted(names))


def summary(build: Build, left_out: dict[str, str]) -> list[str]:
    def kib(path: Path) -> str:
        return f"{path.stat().st_size / 1024:.0f} KiB"

    sanitized = f", sanitizers: {', '.join(build.sanitizers)}" if build.sanitizers else ""
    lines = [f"hisparse {build.version}: built {build.extension.name} ({kib(build.extension)}{sanitized}) with"]
    lines.append(f"  cpu   {build.cxx.version}")
    for name, image in build.images.items():
        target: DeviceTarget = getattr(build, name)
        lines.append(f"  {name}  {' '.join(target.archs)} ({kib(image)}), {target.compiler.version}")
    return lines + [f"  without {name}: {reason}" for name, reason in left_out.items()]
