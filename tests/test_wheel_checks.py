"""ci/wheel_checks.py on wheels that must fail it, made of one that passes."""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
import wheel_checks
from hisparse_build.code_objects import FormatError, write_bundle
from hisparse_build.fat_binary import MAGIC, read_fat_binary
from hisparse_build.matrix import MATRIX
from wheel_checks import CHECKS, Fault, Wheel

ROOT = Path(__file__).resolve().parents[1]
VERSION = (ROOT / "hisparse" / "_version.py").read_text().split('"')[1]
ENTRY = struct.Struct("<HHIQIIIIIIQQQ")


def cubin(arch: int, abi: int) -> bytes:
    return b"\x7fELF\x02\x01\x01\x33" + bytes([abi]) + bytes(9) + struct.pack("<H", 190) + bytes(44)


def fat_binary(entries: list[tuple[int, int, bytes]], packed: int = 0) -> bytes:
    body = b""
    for kind, arch, data in entries:
        data += bytes(-len(data) % 8)
        body += ENTRY.pack(kind, 0x101, ENTRY.size, len(data), packed, 0, 0, arch, 0, 0, 0, 0, 0) + data
    return MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def cuda_image(ptx: bytes = b"8.3", abi: int = 7, archs: tuple[int, ...] = (80, 90, 100, 120)) -> bytes:
    codes = [(2, arch, cubin(arch, abi if arch < 100 else 8)) for arch in archs]
    return fat_binary([(1, 80, b"//\n.version " + ptx + b"\n.target sm_80\n"), *codes])


def elf(tmp_path: Path, *flags: str, source: str = "", image: bytes = b"", strip: bool = True) -> bytes:
    """An extension without content, linked as the real one unless `flags` say otherwise."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler {compiler[0]}")
    (tmp_path / "image").write_bytes(image)
    (tmp_path / "e.cpp").write_text('extern "C" __attribute__((visibility("default"))) void PyInit__C() {}' + source)
    assembly = f'.section .rodata, "a"\n.balign 4096\n.incbin "{tmp_path / "image"}"\n.section .note.GNU-stack, ""\n'
    (tmp_path / "i.S").write_text(assembly)
    usual = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-z,relro,-z,now,-z,noexecstack", "-Wl,--as-needed"]
    if strip:
        usual.append("-s")
    output = tmp_path / "e.so"
    subprocess.run([*compiler, *usual, tmp_path / "e.cpp", tmp_path / "i.S", *flags, "-o", output], check=True)
    return output.read_bytes()


def make(tmp_path: Path, extension: bytes, label: str = "", platform: str = "manylinux_2_17_x86_64", **others) -> Wheel:
    """A wheel of the tree's package around an extension; `others` replace files (None: leave it out)."""
    version = VERSION + (f"+{label}" if label else "")
    info = f"hisparse-{version}.dist-info"
    package = [path for path in (ROOT / "hisparse").rglob("*") if path.is_file() and path.suffix not in {".so", ".pyc"}]
    files = {str(path.relative_to(ROOT)): path.read_bytes() for path in package}
    files["hisparse/_version.py"] = f'__version__ = "{version}"\n'.encode()
    files["hisparse/_C.cpython-311-x86_64-linux-gnu.so"] = extension
    metadata = f"Metadata-Version: 2.4\nName: hisparse\nVersion: {version}\nRequires-Python: >=3.10\n"
    files[f"{info}/METADATA"] = (metadata + "Requires-Dist: numpy>=1.23\n").encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-{platform}\n".encode()
    for name in ("entry_points.txt", "top_level.txt", "licenses/LICENSE"):
        files[f"{info}/{name}"] = b""
    files |= others.get("files", {})
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files |= others.get("after_record", {})
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    path = tmp_path / f"hisparse-{version}-cp311-cp311-{platform}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return Wheel(path)


def fault(wheel: Wheel, check: str) -> str:
    with pytest.raises((Fault, FormatError)) as raised:
        CHECKS[check](wheel)
    return str(raised.value)


def test_a_wheel_that_is_right_passes(tmp_path, capsys):
    pytest.importorskip("auditwheel")
    wheel = make(tmp_path, elf(tmp_path, image=cuda_image()), "cu")
    found = {name: CHECKS[name](wheel) for name in CHECKS if name not in ("tag", "libraries")}
    assert found["cuda"] == "sm_80 (ABI 7) sm_90 (ABI 7) sm_100 (ABI 8) sm_120 (ABI 8) compute_80 (PTX 8.3)"
    assert found["rocm"] == "none"


def test_main_names_each_fault_and_fails(tmp_path, capsys):
    wheel = make(tmp_path, elf(tmp_path), "cu")
    assert wheel_checks.main([str(wheel.path)]) == 1
    assert "FAIL cuda       no CUDA code" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "source", "check", "named"),
    [
        (["-Wl,-z,execstack"], "", "hardening", "executable stack"),
        (["-Wl,-z,lazy"], "", "hardening", "no BIND_NOW"),
        (
            [],
            'asm(".section .both, \\"awx\\"; .quad 0; .text");',
            "hardening",
            "1 segments that are writable and executable",
        ),
        (
            ["-Wl,-z,notext"],
            'asm(".text\\n.quad PyInit__C"); extern "C" void other() {}',
            "hardening",
            "has DT_TEXTREL",
        ),
        (["-Wl,-z,norelro"], "", "hardening", "no RELRO"),
        (["-Wl,-rpath,/opt/rocm/lib", "-Wl,--disable-new-dtags"], "", "hardening", "DT_RPATH"),
        (["-Wl,-rpath,/opt/rocm/lib", "-Wl,--enable-new-dtags"], "", "hardening", "DT_RUNPATH"),
        (
            [],
            'extern "C" __attribute__((visibility("default"))) void more() {}',
            "symbols",
            "exports ['PyInit__C', 'more']",
        ),
        (["-Wl,--no-as-needed", "-lstdc++"], "", "libraries", "libstdc++.so.6"),
    ],
)
def test_an_extension_that_is_linked_wrongly_fails(tmp_path, flags, source, check, named):
    assert named in fault(make(tmp_path, elf(tmp_path, *flags, source=source), "cpu"), check)


def test_an_extension_with_its_symbol_table_fails(tmp_path):
    assert fault(make(tmp_path, elf(tmp_path, strip=False), "cpu"), "symbols") == "not stripped"


def test_a_gpu_runtime_is_no_library_to_need(tmp_path):
    library = tmp_path / "libamdhip64.so.7"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", library], check=True)
    wheel = make(tmp_path, elf(tmp_path, "-Wl,--no-as-needed", f"-L{tmp_path}", "-l:libamdhip64.so.7"), "cpu")
    assert "libamdhip64.so.7" in fault(wheel, "libraries")


@pytest.mark.parametrize(
    ("image", "named"),
    [
        (b"", "no CUDA code"),
        (cuda_image(archs=(80, 90, 100)), "['sm_120']"),
        (cuda_image(archs=(75, 80, 90, 100, 120)), "['sm_75']"),
        (cuda_image(ptx=b"9.0"), "PTX 9.0, newer than 8.3"),
        (cuda_image(abi=8), "sm_80: cubin ABI 8"),
        (fat_binary([(2, 80, cubin(80, 7))], packed=100), "sm_80 is compressed"),
        (fat_binary([(1, 80, b"no version")]), "differ from ci/matrix.json"),
        (fat_binary([(64, 80, b"")]), "unknown kind 64"),
    ],
)
def test_cuda_code_that_some_driver_would_refuse_fails(tmp_path, image, named):
    assert named in fault(make(tmp_path, elf(tmp_path, image=image), "cu"), "cuda")


def test_rocm_code_of_other_archs_fails(tmp_path):
    wheel = make(tmp_path, elf(tmp_path, image=write_bundle({"gfx942": b"\x7fELF"})), "rocm")
    assert "archs differ from ci/matrix.json: ['gfx942']" in fault(wheel, "rocm")


@pytest.mark.parametrize(("check", "image"), [("cuda", cuda_image()), ("rocm", write_bundle({"gfx942": b""}))])
def test_code_of_a_target_that_the_label_leaves_out_fails(tmp_path, check, image):
    assert "in a wheel without" in fault(make(tmp_path, elf(tmp_path, image=image), "cpu"), check)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"hisparse.libs/libamdhip64.so.7": b""}, "hisparse.libs/libamdhip64.so.7"),
        ({"hisparse/libc10.so": b""}, "extensions"),
        ({"hisparse/notes.txt": b""}, "hisparse/notes.txt"),
        ({"tests/conftest.py": b""}, "tests/conftest.py"),
    ],
)
def test_contents_that_do_not_belong_there_fail(tmp_path, files, named):
    assert named in fault(make(tmp_path, b"", "cpu", files=files), "contents")


def test_a_file_that_is_not_what_record_says_fails(tmp_path):
    wheel = make(tmp_path, b"", "cpu", after_record={"hisparse/cli.py": b"changed"})
    assert fault(wheel, "contents") == "hisparse/cli.py is not what RECORD says"


def test_versions_that_differ_fail(tmp_path):
    wheel = make(tmp_path, b"", "cpu", files={"hisparse/_version.py": b'__version__ = "9.9"\n'})
    assert "hisparse/_version.py is not" in fault(wheel, "version")
    metadata = f"Version: {VERSION}+cpu\nRequires-Python: >=3.10\nRequires-Dist: torch\n".encode()
    wheel = make(tmp_path, b"", "cpu", files={f"hisparse-{VERSION}+cpu.dist-info/METADATA": metadata})
    assert "needs more than numpy" in fault(wheel, "version")


def test_a_label_that_the_matrix_does_not_know_fails(tmp_path):
    assert "does not know: tpu" in fault(make(tmp_path, b"", "tpu"), "version")


def test_a_wheel_over_the_limit_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(MATRIX["wheel"], "max_megabytes", 0.001)
    assert "over the limit" in fault(make(tmp_path, os.urandom(5000), "cpu"), "size")


def test_a_platform_tag_that_was_not_audited_fails(tmp_path):
    pytest.importorskip("auditwheel")
    source = 'extern "C" double exp(double); volatile double x; double y() { return exp(x); }  // GLIBC_2.29'
    wheel = make(tmp_path, elf(tmp_path, "-lm", source=source), "cpu", "manylinux_2_5_x86_64")
    assert "auditwheel finds manylinux_2_" in fault(wheel, "tag")


def test_fat_binary_reader_refuses_what_is_none():
    with pytest.raises(FormatError, match="not a fat binary"):
        read_fat_binary(b"\x7fELF")
