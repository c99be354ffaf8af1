"""The build's steps on a small tree of its own: hipify, device code, bundle, and what a second build does."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hisparse_build import hipify as hipify_module
from hisparse_build import toolchains
from hisparse_build.code_objects import FormatError, check_code_object, read_bundle, read_code_object, write_bundle
from hisparse_build.graph import Build, DeviceTarget
from hisparse_build.matrix import ROCM_ARCHS, BuildError

ROOT = Path(__file__).resolve().parents[1]

SOURCES = {
    "kernels/common/sum.cuh": """#pragma once
#include <cuda_runtime.h>
__device__ inline void add(int* sum, const int* values) {
  __shared__ int partial;
  if (threadIdx.x == 0) partial = 0;
  __syncthreads();
  atomicAdd(&partial, values[threadIdx.x] * kFactor);
  __syncthreads();
  if (threadIdx.x == 0) *sum = partial;
}
""",
    "kernels/common/factor.h": "#pragma once\nconstexpr int kFactor = 3;\n",
    "kernels/cuda/hisparse.cu": """#include "../common/factor.h"
#include "../common/sum.cuh"
extern "C" __global__ void kernel(int* sum, const int* values) { add(sum, values); }
""",
    "kernels/hip/hisparse.hip": """#include <hip/hip_runtime.h>
#include "../common/factor.h"
#include "../common/sum.cuh"
extern "C" __global__ void kernel(int* sum, const int* values) {
  if (__ballot(values[threadIdx.x] > 0) != 0) add(sum, values);
}
""",
    "kernels/host/binding.cpp": """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
""",
    "kernels/cpu/kernels.cpp": '#include "../common/factor.h"\nint factor() { return kFactor; }\n',
}


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "a tree"  # the space is part of the test
    for name, text in SOURCES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def snapshot(folder: Path, leave_out: str = "") -> dict[str, tuple[bytes, int]]:
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        str(name): (path.read_bytes(), path.stat().st_mtime_ns)
        for name, path in files.items()
        if name.parts[0] != leave_out
    }


def cuda(*archs: str) -> DeviceTarget:
    try:
        return DeviceTarget(toolchains.find_nvcc(ROOT), list(archs))
    except BuildError as missing:
        pytest.skip(str(missing))


def rocm(*archs: str) -> DeviceTarget:
    try:
        return DeviceTarget(toolchains.find_rocm_compiler(ROOT), list(archs))
    except BuildError as missing:
        pytest.skip(str(missing))


def build(tree: Path, cuda: DeviceTarget | None = None, rocm: DeviceTarget | None = None) -> Build:
    result = Build(tree, "0", toolchains.find_cxx(), cuda, rocm)
    result.run()
    return result


def test_hipify_translates_into_build_and_nowhere_else(tree):
    pytest.importorskip("torch")
    before = snapshot(tree)
    output = hipify_module.hipify(tree, tree / "build")
    assert snapshot(tree, leave_out="build") == before
    assert output == tree / "build" / "hip" / "kernels"
    files = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert files == {"common/sum.cuh", "common/factor.h", "hip/hisparse.hip"}
    translated = (output / "common" / "sum.cuh").read_text()
    assert "#include <hip/hip_runtime.h>" in translated and "cuda_runtime" not in translated
    assert (output / "hip" / "hisparse.hip").read_text() == SOURCES["kernels/hip/hisparse.hip"]


def test_hipify_again_and_through_a_symlink_changes_nothing(tree, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    hipify_module.hipify(tree, tree / "build")
    once = snapshot(tree / "build")
    hipify_module.hipify(tree, tree / "build")
    assert snapshot(tree / "build") == once
    link = tmp_path / "link"
    link.symlink_to(tree)
    hipify_module.hipify(link, link / "build")
    assert snapshot(tree / "build") == once
    monkeypatch.chdir(tmp_path)
    hipify_module.hipify(Path("link"), Path("link", "build"))
    assert snapshot(tree / "build") == once


def test_hipify_follows_the_sources(tree):
    pytest.importorskip("torch")
    output = hipify_module.hipify(tree, tree / "build")
    edit(tree / "kernels/common/factor.h", "3", "4")
    (tree / "kernels/common/sum.cuh").rename(tree / "kernels/common/total.cuh")
    hipify_module.hipify(tree, tree / "build")
    assert {path.name for path in (output / "common").iterdir()} == {"total.cuh", "factor.h"}
    assert "kFactor = 4" in (output / "common" / "factor.h").read_text()
    for name in ("total.cuh", "factor.h"):
        assert (output / "common" / name).read_text().count("generated by hipify") == 1


def test_hipify_that_would_rename_a_source_is_an_error(tree):
    pytest.importorskip("torch")
    (tree / "kernels/common/sum.cuh").rename(tree / "kernels/common/cuda_sum.cuh")
    with pytest.raises(BuildError, match="hipify did not write .*cuda_sum.cuh"):
        hipify_module.hipify(tree, tree / "build")


def test_every_arch_is_compiled_checked_and_bundled(tree):
    result = build(tree, rocm=rocm(*ROCM_ARCHS))
    bundle = read_bundle(result.images["rocm"].read_bytes())
    assert list(bundle) == list(ROCM_ARCHS)
    for arch, data in bundle.items():
        assert list(check_code_object(data, arch, ROCM_ARCHS[arch], 5).kernels) == ["kernel"]


def test_second_build_does_nothing_and_a_changed_header_rebuilds_its_users(tree, capfd):
    targets = {"cuda": cuda("sm_90"), "rocm": rocm("gfx942", "gfx1100")}
    result = build(tree, **targets)
    first = {target: path.read_bytes() for target, path in result.images.items()}
    assert "cuda sm_90" in capfd.readouterr().out
    build(tree, **targets)
    assert "no work to do" in capfd.readouterr().out
    edit(tree / "kernels/common/factor.h", "3", "5")
    build(tree, **targets)
    printed = capfd.readouterr().out
    for step in ("cuda sm_90", "rocm gfx942", "rocm gfx1100", "c++ cpu/kernels.cpp", "link"):
        assert step in printed
    assert "c++ host/binding.cpp" not in printed
    assert all(path.read_bytes() != first[target] for target, path in result.images.items())


def test_another_compiler_rebuilds(tree, capfd):
    build(tree)
    capfd.readouterr()
    cxx = toolchains.find_cxx()
    Build(tree, "0", toolchains.Compiler(cxx.command, "another version"), None, None).run()
    assert "c++ host/binding.cpp" in capfd.readouterr().out


@pytest.mark.parametrize("target", ["cuda", "rocm"])
def test_a_warning_in_device_code_fails_the_build(tree, target, capfd):
    source = tree / "kernels" / {"cuda": "cuda/hisparse.cu", "rocm": "hip/hisparse.hip"}[target]
    edit(source, "const int* values) {", "const int* values) { int idle = 0;")
    targets = {target: cuda("sm_90") if target == "cuda" else rocm("gfx942")}
    with pytest.raises(BuildError, match="a step of the build failed"):
        build(tree, **targets)
    assert "idle" in capfd.readouterr().out


def test_a_spill_in_cuda_code_fails_the_build(tree, capfd):
    edit(
        tree / "kernels/cuda/hisparse.cu",
        '" __global__ void kernel',
        '" __global__ void __launch_bounds__(1024, 2) kernel',
    )
    spilling = """float r[64];
  for (int i = 0; i < 64; ++i) r[i] = values[i * threadIdx.x];
  __syncthreads();
  for (int j = 0; j < 64; ++j) for (int i = 0; i < 64; ++i) r[i] = r[i] * r[j] + r[(i + 7) % 64];
  for (int i = 0; i < 64; ++i) sum[i + threadIdx.x] = r[i];"""
    edit(tree / "kernels/cuda/hisparse.cu", "add(sum, values);", spilling)
    with pytest.raises(BuildError):
        build(tree, cuda=cuda("sm_90"))
    assert "spill" in capfd.readouterr().out


def test_wrong_wavefront_size_fails_the_build(tree, capfd):
    """F03: a build for an arch with an unexpected width fails."""
    found = rocm("gfx1100")
    wave64 = toolchains.Compiler((*found.compiler.command, "-mwavefrontsize64"), "wave64")
    with pytest.raises(BuildError):
        build(tree, rocm=DeviceTarget(wave64, ["gfx1100"]))
    assert "gfx1100: wavefront size 64, expected 32" in capfd.readouterr().out


def test_code_object_checks(tree):
    result = build(tree, rocm=rocm("gfx942", "gfx1100"))
    code_objects = read_bundle(result.images["rocm"].read_bytes())
    check_code_object(code_objects["gfx942"], "gfx942", 64, 5)
    for arguments, message in [
        (("gfx950", 64, 5), "compiled for gfx950, but the code object is for gfx942"),
        (("gfx942", 32, 5), "wavefront size 64, expected 32"),
        (("gfx942", 64, 6), "code object version 5, expected 6"),
    ]:
        with pytest.raises(FormatError, match=message):
            check_code_object(code_objects["gfx942"], *arguments)
    newer = code_objects["gfx942"][:8] + b"\4" + code_objects["gfx942"][9:]
    with pytest.raises(FormatError, match="code object version 6, expected 5"):
        check_code_object(newer, "gfx942", 64, 5)
    with pytest.raises(FormatError, match="not an AMD GPU code object"):
        read_code_object(Path(sys.executable).resolve().read_bytes()[:4096])


def test_reader_agrees_with_another_elf_reader(tree):
    result = build(tree, rocm=rocm("gfx90a", "gfx1201"))
    for arch in ("gfx90a", "gfx1201"):
        path = result.folder / f"{arch}.co"
        with path.open("rb") as file:
            elf = ELFFile(file)
            descriptor = elf.get_section_by_name(".dynsym").get_symbol_by_name("kernel.kd")[0]
            section = elf.get_section(descriptor["st_shndx"])
            start = descriptor["st_value"] - section["sh_addr"]
            # Bit 10 of the descriptor's kernel_code_properties: ENABLE_WAVEFRONT_SIZE32.
            (properties,) = struct.unpack_from("<H", section.data(), start + 56)
            version = elf.header["e_ident"]["EI_ABIVERSION"]
        found = read_code_object(path.read_bytes())
        assert found.wavefront_sizes == {32 if properties >> 10 & 1 else 64}
        assert found.arch == arch
        assert found.version == version + 2 == 5


def test_bundle_keeps_its_code_objects():
    code_objects = {"gfx90a": b"abc", "gfx1100": bytes(range(256)) * 33, "gfx942": b""}
    bundle = write_bundle(code_objects)
    assert read_bundle(bundle) == code_objects
    assert list(read_bundle(bundle)) == list(code_objects)
    assert bundle.index(b"abc") % 4096 == 0
    with pytest.raises(FormatError, match="bundle"):
        read_bundle(b"CCOB" + bundle)


def test_bundle_is_what_clang_offload_bundler_writes(tree):
    bundler = shutil.which("clang-offload-bundler")
    if bundler is None:
        pytest.skip("no clang-offload-bundler")
    result = build(tree, rocm=rocm("gfx942", "gfx1100"))
    names = ["host-x86_64-unknown-linux-gnu"] + [f"hipv4-amdgcn-amd-amdhsa--{arch}" for arch in ("gfx942", "gfx1100")]
    inputs = [os.devnull, *(str(result.folder / f"{arch}.co") for arch in ("gfx942", "gfx1100"))]
    output = tree / "reference"
    options = ["-type=o", "-bundle-align=4096", f"-targets={','.join(names)}", f"-output={output}"]
    subprocess.run([bundler, *options, *(f"-input={path}" for path in inputs)], check=True)
    assert output.read_bytes() == result.images["rocm"].read_bytes()
