"""The extension that these tests import, as a file; and the packages that pip and setuptools make of the tree."""

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hisparse_build.code_objects import check_code_object, read_bundle
from hisparse_build.matrix import CODE_OBJECT_VERSION, ROCM_ARCHS

from hisparse import _C

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1"}
LOADER = re.compile(r"ld-linux-.*\.so\.\d")


@pytest.fixture(scope="module")
def elf():
    with open(_C.__file__, "rb") as file:
        yield ELFFile(file)


def test_extension_needs_the_c_and_cpp_libraries_alone(elf):
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
    assert "libc.so.6" in needed
    assert {name for name in needed - LIBRARIES if not LOADER.fullmatch(name)} == set()


def test_extension_exports_its_init_function_alone(elf):
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    defined = [symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name]
    assert defined == ["PyInit__C"]


def test_extension_is_hardened(elf):
    stack = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_GNU_STACK"]
    assert len(stack) == 1 and stack[0]["p_flags"] & 1 == 0
    assert any(segment["p_type"] == "PT_GNU_RELRO" for segment in elf.iter_segments())
    tags = {tag.entry.d_tag: tag.entry.d_val for tag in elf.get_section_by_name(".dynamic").iter_tags()}
    assert tags["DT_FLAGS"] & 0x8  # DF_BIND_NOW
    assert not {"DT_TEXTREL", "DT_RPATH", "DT_RUNPATH"} & set(tags)


def kernel_names(folder: Path) -> list[str]:
    """The list in params.h is made by a macro, so a compiler reads it."""
    source, program = folder / "names.cpp", folder / "names"
    source.write_text(
        '#include <cstdio>\n#include "params.h"\n'
        "int main() { for (const char* name : hisparse::kKernelNames) std::puts(name); }\n"
    )
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    subprocess.run([*compiler, "-std=c++17", f"-I{ROOT / 'kernels' / 'common'}", source, "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()


def test_embedded_code_objects_are_those_that_build_info_names(tmp_path):
    archs = [arch for arch in _C.build_info()["rocm_archs"] if arch]
    if not archs:
        pytest.skip("built without ROCm")
    image = Path(_C.__file__).read_bytes()
    start = image.index(b"__CLANG_OFFLOAD_BUNDLE__")
    assert start % 4096 == 0
    bundle = read_bundle(image[start:])
    assert list(bundle) == archs
    for arch, data in bundle.items():
        found = check_code_object(data, arch, ROCM_ARCHS[arch], CODE_OBJECT_VERSION)
        assert sorted(found.kernels) == sorted(kernel_names(tmp_path))


def test_embedded_fat_binary_holds_the_archs_that_build_info_names():
    archs = [arch for arch in _C.build_info()["cuda_archs"] if arch]
    if not archs:
        pytest.skip("built without CUDA")
    image = Path(_C.__file__).read_bytes()
    magic = struct.pack("<I", 0xBA55ED50)
    start = next(place for place in range(0, len(image), 4096) if image.startswith(magic, place))
    header_size, size = struct.unpack_from("<HQ", image, start + 6)
    entry, end, found = start + header_size, start + header_size + size, []
    while entry < end:
        kind, entry_header, entry_size = struct.unpack_from("<H2xIQ", image, entry)
        (arch,) = struct.unpack_from("<I", image, entry + 28)
        found.append(f"{ {1: 'compute', 2: 'sm'}[kind] }_{arch}")
        entry += entry_header + entry_size
    assert sorted(found) == sorted(re.sub("[af]$", "", arch) for arch in archs)


# ---- packages


def run(*command: str, cwd: Path) -> str:
    # What the packages hold does not depend on the optimisation, and without it they are built in half the time.
    environment = {**os.environ, "HISPARSE_TARGETS": "cpu", "CXXFLAGS": "-O0", "PIP_NO_INDEX": "1"}
    for name in ("HISPARSE_SANITIZE", "PYTHONPATH"):
        environment.pop(name, None)
    done = subprocess.run(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def make_wheel(tree: Path, output: Path) -> Path:
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(output)]
    run(sys.executable, "-m", "pip", "wheel", "-v", *options, str(tree), cwd=tree.parent)
    (wheel,) = output.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, less the extension's bytes: paths of the build tree are in its assertions."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    return {name: b"" if name.endswith((".so", "/RECORD")) else data for name, data in files.items()}


def sources(tree: Path) -> dict[str, bytes]:
    """Every file but what builds leave behind."""
    made = {"build", "hisparse.egg-info", "__pycache__", ".toolchains"}
    files = (path for path in tree.rglob("*") if path.is_file() and path.suffix not in {".so", ".pyc"})
    names = (path.relative_to(tree) for path in files)
    return {str(name): (tree / name).read_bytes() for name in names if not made & set(name.parts)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = tmp_path_factory.mktemp("packages") / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", ".clang-format"):
        shutil.copy2(ROOT / name, tree)
    for name in ("hisparse", "kernels", "ci", "tests", "docs", "benchmarks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyc"))
    return tree


@pytest.mark.slow
def test_wheels_of_the_tree_of_a_symlink_and_of_the_sdist_are_the_same(tree, tmp_path):
    before = sources(tree)
    wheel = make_wheel(tree, tmp_path / "first")
    again = make_wheel(tree, tmp_path / "again")
    link = tmp_path / "link"
    link.symlink_to(tree)
    linked = make_wheel(link, tmp_path / "linked")
    assert sources(tree) == before
    assert wheel.name == again.name == linked.name
    files = contents(wheel)
    assert contents(again) == contents(linked) == files

    package = {name for name in before if name.startswith("hisparse/")}
    in_wheel = {name for name in files if name.startswith("hisparse/")}
    extensions = {name for name in in_wheel if name.endswith(".so")}
    assert len(extensions) == 1
    assert in_wheel - extensions == package
    assert {name.split("/")[0] for name in files if not name.startswith("hisparse/")} == {
        "hisparse-" + wheel.name.split("-")[1] + ".dist-info"
    }

    run(sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')", cwd=tree)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    packed = sources(unpacked)
    assert {name: data for name, data in packed.items() if name in before} == before
    assert set(packed) - set(before) == {"PKG-INFO", "setup.cfg"}
    assert contents(make_wheel(unpacked, tmp_path / "of sdist")) == files

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = "import hisparse; print(hisparse.__file__, hisparse.build_info()['targets'])"
    printed = run(sys.executable, "-c", code, cwd=tmp_path / "installed")
    assert printed.split(maxsplit=1) == [str(tmp_path / "installed" / "hisparse" / "__init__.py"), "['cpu']\n"]
