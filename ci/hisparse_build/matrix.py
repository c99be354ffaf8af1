"""The targets and architectures (ci/matrix.json), and how environment variables choose among them."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

MATRIX = json.loads((Path(__file__).resolve().parents[1] / "matrix.json").read_text())

TARGETS = ("cpu", "cuda", "rocm")
CUDA_ARCHS: tuple[str, ...] = tuple(MATRIX["cuda"]["archs"])
ROCM_ARCHS: dict[str, int] = {arch: entry["wavefront_size"] for arch, entry in MATRIX["rocm"]["archs"].items()}
CODE_OBJECT_VERSION: int = MATRIX["rocm"]["code_object_version"]


class BuildError(Exception):
    """The build cannot be done as asked; the message says why and what would help."""


class MissingToolchain(BuildError):
    """A target's compiler is not there: the target is left out, unless it is demanded."""


def _entries(value: str | None) -> list[str]:
    return [entry for entry in re.split(r"[;,\s]+", value or "") if entry]


def demanded_targets(value: str | None) -> tuple[str, ...] | None:
    """The targets that HISPARSE_TARGETS demands, or None where it is unset or empty: whatever can be built."""
    entries = _entries(value)
    for entry in entries:
        if entry not in TARGETS:
            raise BuildError(f"HISPARSE_TARGETS: unknown target {entry!r}; known: {', '.join(TARGETS)}")
    return tuple(target for target in TARGETS if target in entries) if entries else None


def cuda_archs(value: str | None, supported: Iterable[str]) -> list[str]:
    """The entries of TORCH_CUDA_ARCH_LIST as nvcc names them, real architectures (sm_90) before PTX (compute_90).

    Takes torch's "9.0;10.0+PTX" as well as "sm_90" and "compute_90". Where `value` is unset or empty: the matrix's
    architectures, as far as this nvcc supports them.
    """
    supported = set(supported)
    entries = _entries(value)
    if not entries:
        return [arch for arch in CUDA_ARCHS if arch in supported]
    names = r"(?P<kind>sm|compute)_(?P<code>\d+)|(?P<major>\d+)\.(?P<minor>\d)"
    chosen = []
    for entry in entries:
        match = re.fullmatch(rf"(?:{names})(?P<variant>[af]?)(?P<ptx>\+PTX)?", entry)
        number = match and (match["code"] or match["major"] + match["minor"])
        kind = match and (match["kind"] or "sm")
        if not match or f"{kind}_{number}" not in supported:
            known = ", ".join(sorted(supported, key=lambda arch: (arch.split("_")[0] != "sm", int(arch.split("_")[1]))))
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: unknown architecture {entry!r}; this nvcc knows {known} "
                '(written as "9.0", "9.0+PTX" or "sm_90")'
            )
        chosen.append(f"{kind}_{number}{match['variant']}")
        if match["ptx"]:
            chosen.append(f"compute_{number}{match['variant']}")
    return sorted(dict.fromkeys(chosen), key=lambda arch: arch.startswith("compute_"))


def rocm_archs(value: str | None, supported: Iterable[str]) -> list[str]:
    """The entries of PYTORCH_ROCM_ARCH, or where it is unset or empty the matrix's architectures that this compiler
    supports. Only architectures of the matrix can be built: the kernels rely on their wavefront size."""
    supported = set(supported)
    entries = _entries(value)
    if not entries:
        return [arch for arch in ROCM_ARCHS if arch in supported]
    for entry in entries:
        if entry not in ROCM_ARCHS or entry not in supported:
            known = ", ".join(arch for arch in ROCM_ARCHS if arch in supported)
            raise BuildError(f"PYTORCH_ROCM_ARCH: unknown architecture {entry!r}; known: {known}")
    return list(dict.fromkeys(entries))
