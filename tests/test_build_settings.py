"""How a build chooses targets, architectures and sanitizers; ci/matrix.json as the one list of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hisparse_build import extension, toolchains
from hisparse_build.matrix import CUDA_ARCHS, MATRIX, ROCM_ARCHS, BuildError, cuda_archs, demanded_targets, rocm_archs
from setup_toolchains import device_library_constants

ROOT = Path(__file__).resolve().parents[1]
NVCC = {"sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_75", "compute_80", "compute_90", "compute_100"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("9.0", ["sm_90"]),
        ("9.0;10.0+PTX", ["sm_90", "sm_100", "compute_100"]),
        ("8.0+PTX 9.0a", ["sm_80", "sm_90a", "compute_80"]),
        ("sm_90, compute_80", ["sm_90", "compute_80"]),
        ("compute_80;sm_90;9.0", ["sm_90", "compute_80"]),
        ("sm_120", ["sm_120"]),
    ],
)
def test_cuda_archs(value, expected):
    assert cuda_archs(value, NVCC) == expected


@pytest.mark.parametrize(
    "value", ["9.1", "sm_9", "90", "9.0;Hopper", "9.0+ptx", "sm_91", "compute_120", "sm90", "9.0b"]
)
def test_unknown_cuda_arch_names_the_known_ones(value):
    with pytest.raises(BuildError, match=r"TORCH_CUDA_ARCH_LIST: unknown architecture .* sm_75, sm_80, sm_90, sm_100"):
        cuda_archs(value, NVCC)


def test_rocm_archs():
    assert rocm_archs("gfx942;gfx1100", ROCM_ARCHS) == ["gfx942", "gfx1100"]
    assert rocm_archs("gfx1201 gfx950,gfx1201", ROCM_ARCHS) == ["gfx1201", "gfx950"]


@pytest.mark.parametrize("value", ["gfx9000", "gfx942;mi300", "942", "gfx942:xnack+"])
def test_unknown_rocm_arch_names_the_known_ones(value):
    with pytest.raises(BuildError, match=r"PYTORCH_ROCM_ARCH: unknown architecture .* gfx90a, gfx942, .*gfx1201"):
        rocm_archs(value, ROCM_ARCHS)


def test_an_arch_that_the_compiler_lacks_is_refused_by_name_and_left_out_of_the_defaults():
    with pytest.raises(BuildError, match=r"'gfx950'; known: gfx90a, gfx942$"):
        rocm_archs("gfx950", {"gfx90a", "gfx942"})
    assert rocm_archs(None, {"gfx90a", "gfx942", "gfx906"}) == ["gfx90a", "gfx942"]
    assert cuda_archs("", {"sm_75", "sm_80", "sm_90", "compute_80"}) == ["sm_80", "sm_90", "compute_80"]


def test_defaults_are_the_matrix():
    matrix = json.loads((ROOT / "ci" / "matrix.json").read_text())
    assert cuda_archs(None, {*NVCC, *matrix["cuda"]["archs"]}) == matrix["cuda"]["archs"]
    assert rocm_archs(None, {*matrix["rocm"]["archs"], "gfx906"}) == list(matrix["rocm"]["archs"])
    assert matrix["cuda"]["archs"] == ["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"]
    wave64 = ["gfx90a", "gfx942", "gfx950"]
    assert [arch for arch, size in ROCM_ARCHS.items() if size == 64] == wave64
    assert [arch for arch, size in ROCM_ARCHS.items() if size == 32] == list(ROCM_ARCHS)[len(wave64) :]
    assert all(arch.startswith("gfx9") == (size == 64) for arch, size in ROCM_ARCHS.items())


def test_python_versions_are_the_matrix():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == MATRIX["python"]
    assert f'requires-python = ">={MATRIX["python"][0]}"' in project


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("", None), ("cpu", ("cpu",)), ("rocm;cpu", ("cpu", "rocm")), ("cuda, rocm", ("cuda", "rocm"))],
)
def test_demanded_targets(value, expected):
    assert demanded_targets(value) == expected


def test_unknown_target_names_the_known_ones():
    with pytest.raises(BuildError, match="unknown target 'hip'; known: cpu, cuda, rocm"):
        demanded_targets("cpu;hip")


@pytest.fixture
def no_toolchains(monkeypatch, tmp_path):
    for name in ("HISPARSE_TARGETS", "HISPARSE_SANITIZE", "TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HISPARSE_TOOLCHAINS", str(tmp_path))
    monkeypatch.setattr(toolchains, "system_nvcc", lambda: None)
    monkeypatch.setattr(toolchains, "system_rocm_compiler", lambda: None)
    return monkeypatch


def test_what_cannot_be_built_is_left_out_and_the_reason_said(no_toolchains):
    build, left_out = extension.configure(ROOT, "1.2.3")
    assert build.cuda is None and build.rocm is None
    assert set(left_out) == {"cuda", "rocm"}
    assert "no nvcc" in left_out["cuda"]
    assert "amdclang++" in left_out["rocm"] or "no torch" in left_out["rocm"]


def test_an_older_compiler_builds_the_defaults_that_it_knows_and_says_so(no_toolchains):
    older = toolchains.Compiler(("nvcc",), "nvcc 12.4", frozenset({"sm_80", "sm_90", "compute_80"}))
    no_toolchains.setattr(toolchains, "system_nvcc", lambda: older)
    build, left_out = extension.configure(ROOT, "1.2.3")
    assert build.cuda is not None and build.cuda.archs == ["sm_80", "sm_90", "compute_80"]
    assert left_out["sm_100"] == left_out["sm_120"] == "nvcc 12.4 does not know it"
    no_toolchains.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    build, left_out = extension.configure(ROOT, "1.2.3")
    assert build.cuda is not None and build.cuda.archs == ["sm_80"] and "sm_90" not in left_out


def test_a_compiler_that_knows_no_arch_is_none(no_toolchains):
    no_toolchains.setattr(toolchains, "system_nvcc", lambda: toolchains.Compiler(("nvcc",), "nvcc 1.0"))
    _, left_out = extension.configure(ROOT, "1.2.3")
    assert left_out["cuda"] == "no architecture of ci/matrix.json that nvcc 1.0 knows"
    no_toolchains.setenv("HISPARSE_TARGETS", "cuda")
    with pytest.raises(BuildError, match=r"demands cuda, but there is no architecture .* nvcc 1\.0"):
        extension.configure(ROOT, "1.2.3")


@pytest.mark.parametrize(("target", "lacking"), [("cuda", "no nvcc"), ("rocm", r"no (amdclang\+\+|torch)")])
def test_demanded_target_without_its_compiler_is_an_error(no_toolchains, target, lacking):
    no_toolchains.setenv("HISPARSE_TARGETS", f"cpu;{target}")
    with pytest.raises(BuildError, match=f"HISPARSE_TARGETS demands {target}, but there is {lacking}"):
        extension.configure(ROOT, "1.2.3")


def test_rocm_needs_torch_in_the_build_environment(no_toolchains):
    no_toolchains.setattr(toolchains.importlib.util, "find_spec", lambda name: None)
    no_toolchains.setenv("HISPARSE_TARGETS", "rocm")
    with pytest.raises(BuildError, match="no torch, .* --no-build-isolation"):
        extension.configure(ROOT, "1.2.3")


def test_a_free_threaded_python_is_refused(no_toolchains):
    no_toolchains.setattr(extension.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(BuildError, match="needs the GIL"):
        extension.configure(ROOT, "1.2.3")


def test_no_host_compiler_is_an_error(no_toolchains):
    no_toolchains.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: 'no-such-compiler'"):
        extension.configure(ROOT, "1.2.3")


def test_sanitizers_are_checked_and_build_the_cpu_target_alone(no_toolchains):
    no_toolchains.setenv("HISPARSE_SANITIZE", "undefined,address")
    build, left_out = extension.configure(ROOT, "1.2.3")
    assert build.sanitizers == ("address", "undefined")
    assert build.folder.name.endswith("-address-undefined")
    assert set(left_out.values()) == {"sanitizers look at the CPU target only"}
    for value, message in {
        "adress": "unknown sanitizer 'adress'; known: address",
        "address,thread": "combined",
    }.items():
        no_toolchains.setenv("HISPARSE_SANITIZE", value)
        with pytest.raises(BuildError, match=message):
            extension.configure(ROOT, "1.2.3")


def test_setup_py_fails_with_the_message(tmp_path):
    environment = {**os.environ, "HISPARSE_TARGETS": "gpu"}
    command = [sys.executable, "setup.py", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "error: HISPARSE_TARGETS: unknown target 'gpu'; known: cpu, cuda, rocm" in done.stderr
    assert "Traceback" not in done.stderr


def test_device_libraries_know_every_arch_of_the_matrix():
    files = device_library_constants()
    versions = {name: constants["ISA_version"] for name, constants in files.items() if "isa_version" in name}
    assert len(versions) == len(ROCM_ARCHS)
    assert versions["oclc_isa_version_90a"] == "i32 9010"
    assert versions["oclc_isa_version_942"] == "i32 9402"
    assert versions["oclc_isa_version_1100"] == "i32 11000"
    assert versions["oclc_isa_version_1151"] == "i32 11501"
    assert versions["oclc_isa_version_1201"] == "i32 12001"


def test_shared_sources_hold_no_target_conditional():
    conditional = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|else)\b|__CUDA|__HIP|__GFX|__AMDGCN|__NVCC|USE_ROCM")
    sources = sorted((ROOT / "kernels" / "common").iterdir())
    assert sources
    found = [
        f"{path.name}:{number}: {line}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if conditional.search(line)
    ]
    assert not found


def test_known_cuda_archs_are_those_of_the_matrix_at_least(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    try:
        compiler = toolchains.find_nvcc(ROOT)
    except BuildError:
        pytest.skip("no nvcc")
    assert set(CUDA_ARCHS) <= compiler.archs
