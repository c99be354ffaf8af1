"""`hisparse info`: what this install contains, which drivers and devices it finds, and whether it has code for them.

torch is imported where it is installed, because the driver's library that torch has loaded is the one that is used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import hisparse
from hisparse import _C

SUMMARY = "show targets, drivers and devices, and whether this install covers them"

_RUNTIMES = ("libcuda.so", "libamdhip64.so")


def covering_arch(target: str, arch: str, built: Iterable[str]) -> str | None:
    """Which of the `built` archs a device of this arch runs: code for it, else PTX to compile for it, else None."""
    if target != "cuda":
        return arch if target == "cpu" or arch in built else None
    device = _capability(arch)
    usable = []
    for name in built:
        capability, exact = _capability(name), name.endswith("a")
        is_code = name.startswith("sm_") and capability[0] == device[0] and capability <= device
        is_ptx = name.startswith("compute_") and capability <= device
        if capability == device if exact else is_code or is_ptx:
            usable.append((name.startswith("sm_"), capability, name))
    return max(usable)[2] if usable else None


def _capability(arch: str) -> tuple[int, int]:
    """(9, 0) of sm_90, compute_90 and sm_90a."""
    match = re.search(r"_(\d+)(\d)", arch)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def versions() -> dict[str, str | None]:
    """Versions of what takes part in a call; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("numpy", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found | {"system": platform.platform()}


def collect() -> dict[str, Any]:
    """All that the command shows, as JSON can hold it."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    build = hisparse.build_info()
    targets = []
    for found in _C.targets():
        name = found["target"]
        archs = {"cuda": build["cuda_archs"], "rocm": build["rocm_archs"]}.get(name, ["cpu"])
        devices = [
            device | {"covered_by": covering_arch(name, device["arch"], archs)}
            for device in map(dict, found["devices"])
        ]
        targets.append(dict(found) | {"built": name in build["targets"], "archs": archs, "devices": devices})
    return {
        "version": build["version"],
        "extension": _C.__file__,
        "compiler": build["compiler"],
        "versions": versions(),
        "targets": targets,
        "mapped_runtimes": mapped_runtimes(),
    }


def mapped_runtimes() -> list[str]:
    """Files of CUDA's driver and HIP's runtime in this process. Two of one kind do not know each other's streams."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if Path(path).name.startswith(_RUNTIMES))


def describe(device: dict[str, Any]) -> str:
    kib = device["shared_memory_bytes"] // 1024
    return f"{device['name']}, {device['arch']}, warp size {device['warp_size']}, {kib} KiB shared memory per block"


def lines(info: dict[str, Any]) -> Iterable[str]:
    yield f"hisparse {info['version']}, {info['extension']}"
    yield ", ".join(f"{name} {version or 'not installed'}" for name, version in info["versions"].items())
    yield f"built by {info['compiler']}"
    for target in info["targets"]:
        yield ""
        yield f"{target['target']:<5} {' '.join(target['archs']) if target['built'] else 'not in this build'}"
        if target["library"]:
            yield f"      {target['library']}, version {target['driver_version'] or 'unknown'}"
        for device in target["devices"]:
            covered = device["covered_by"]
            how = f"runs {covered}" if covered else "NOT COVERED: this build has no code for it"
            if (covered or "").startswith("compute_"):
                how += ", compiled by the driver at the first call"
            yield f"      {device['index']}: {describe(device)}" + ("" if covered == "cpu" else f"; {how}")
        if target["built"] and target["unavailable"]:
            yield f"      {target['unavailable']}"
    for name in _RUNTIMES:
        found = [path for path in info["mapped_runtimes"] if Path(path).name.startswith(name)]
        if len(found) > 1:
            yield f"\nWARNING: more than one {name} is loaded, and their streams do not mix: {', '.join(found)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    info = collect()
    sys.stdout.write(json.dumps(info, indent=2) + "\n" if args.json else "\n".join(lines(info)) + "\n")
    return 0
