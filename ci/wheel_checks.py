"""What a wheel has to be before anyone installs it.

    python3 ci/wheel_checks.py WHEEL...

Prints what it found, a line per check, and exits with 1 where something is wrong. Needs pyelftools and auditwheel.
"""

from __future__ import annotations

import base64
import email
import hashlib
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from elftools.elf.elffile import ELFFile
from hisparse_build.code_objects import FormatError, check_code_object, read_bundle
from hisparse_build.fat_binary import MAGIC, read_fat_binary
from hisparse_build.matrix import CODE_OBJECT_VERSION, CUDA_ARCHS, MATRIX, ROCM_ARCHS

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_PAGE = 4096  # device code begins on one
_EXECUTABLE, _WRITABLE, _BIND_NOW = 1, 2, 8


class Fault(Exception):
    """What is wrong with a wheel."""


def expect(right: object, fault: str) -> None:
    if not right:
        raise Fault(fault)


@dataclass(frozen=True)
class Wheel:
    path: Path

    @cached_property
    def files(self) -> dict[str, bytes]:
        with zipfile.ZipFile(self.path) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}

    @cached_property
    def name(self) -> dict[str, str]:
        form = r"hisparse-(?P<version>[^-]+)-(?P<python>cp3\d+)-(?P<abi>cp3\d+)-(?P<platform>\S+)\.whl"
        match = re.fullmatch(form, self.path.name)
        expect(match, f"not the name of a hisparse wheel: {self.path.name}")
        return match.groupdict()

    @cached_property
    def variant(self) -> str:
        label = self.name["version"].partition("+")[2] or "universal"
        expect(label in MATRIX["wheel"]["variants"], f"a label that ci/matrix.json does not know: {label}")
        return label

    @property
    def targets(self) -> list[str]:
        return MATRIX["wheel"]["variants"][self.variant]

    def metadata(self, name: str) -> email.message.Message:
        path = f"hisparse-{self.name['version']}.dist-info/{name}"
        expect(path in self.files, f"no {path}")
        return email.message_from_bytes(self.files[path])

    @cached_property
    def extension(self) -> bytes:
        python = self.name["python"].removeprefix("cp")
        path = f"hisparse/_C.cpython-{python}-x86_64-linux-gnu.so"
        expect(path in self.files, f"no {path}")
        return self.files[path]

    @cached_property
    def elf(self) -> ELFFile:
        return ELFFile(io.BytesIO(self.extension))

    def image(self, target: str, magic: bytes) -> bytes:
        """The extension from where the device code of the target begins; nothing where the wheel is to have none."""
        pages = range(0, len(self.extension), _PAGE)
        start = next((place for place in pages if self.extension.startswith(magic, place)), len(self.extension))
        image, label = self.extension[start:], {"cuda": "CUDA", "rocm": "ROCm"}[target]
        if target in self.targets:
            expect(image, f"no {label} code")
        else:
            expect(not image, f"{label} code in a wheel without {label}")
        return image


def check_size(wheel: Wheel) -> str:
    size, limit = wheel.path.stat().st_size, MATRIX["wheel"]["max_megabytes"]
    expect(size <= limit * 1e6, f"{size / 1e6:.1f} MB, over the limit of {limit} MB")
    return f"{size / 1e3:.0f} KB"


def check_version(wheel: Wheel) -> str:
    source = re.search(r'"(.*)"', (ROOT / "hisparse" / "_version.py").read_text())[1]
    expected = source if wheel.variant == "universal" else f"{source}+{wheel.variant}"
    metadata = wheel.metadata("METADATA")
    for found in (wheel.name["version"], metadata["Version"]):
        expect(found == expected, f"version {found}, expected {expected}")
    expect(f'"{expected}"' in wheel.files["hisparse/_version.py"].decode(), f"hisparse/_version.py is not {expected}")
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    expect(all(line.startswith("numpy") for line in required), f"needs more than numpy: {required}")
    expect(metadata["Requires-Python"] == f">={MATRIX['python'][0]}", f"Requires-Python {metadata['Requires-Python']}")
    return f"{expected}, needs {', '.join(required)}"


def check_tag(wheel: Wheel) -> str:
    name, wheel_file = wheel.name, wheel.metadata("WHEEL")
    python = name["python"]
    expect(name["abi"] == python, f"ABI {name['abi']} of {python}")
    expect(f"{python[2]}.{python[3:]}" in MATRIX["python"], f"{python} is not in ci/matrix.json")
    tags = {f"{python}-{python}-{platform}" for platform in name["platform"].split(".")}
    expect(set(wheel_file.get_all("Tag")) == tags, f"the tags inside differ from the name: {wheel_file.get_all('Tag')}")
    expect(wheel_file["Root-Is-Purelib"] == "false", "Root-Is-Purelib is not false")
    audited = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel.path)], capture_output=True, text=True
    )
    found = re.search(r'platform\s+tag:\s+"(\S+)"', audited.stdout)
    expect(found, f"auditwheel finds no platform tag: {audited.stdout}{audited.stderr}")
    expect(found[1] in name["platform"].split("."), f"auditwheel finds {found[1]}, the name says {name['platform']}")
    newest = MATRIX["wheel"]["newest_platform"]
    expect(_glibc(found[1]) <= _glibc(newest), f"{found[1]} is newer than {newest}")
    return f"{found[1]} (auditwheel), {python}"


def _glibc(platform: str) -> tuple[int, ...]:
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", platform)
    return (int(match[1]), int(match[2])) if match else (99,)


def check_contents(wheel: Wheel) -> str:
    own = {name for name in wheel.files if name.startswith("hisparse/")}
    rest = {name.removeprefix(f"hisparse-{wheel.name['version']}.dist-info/") for name in set(wheel.files) - own}
    package = (path for path in (ROOT / "hisparse").rglob("*") if path.is_file() and path.suffix not in {".pyc", ".so"})
    expected = {str(path.relative_to(ROOT)) for path in package}
    extensions = {name for name in own if name.endswith(".so")}
    expect(len(extensions) == 1, f"extensions: {sorted(extensions)}")
    expect(own - extensions == expected, f"differs from the tree in {sorted((own - extensions) ^ expected)}")
    known = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    expect(rest == known, f"besides the package: {sorted(rest ^ known)} missing or unexpected")
    for line in wheel.files[f"hisparse-{wheel.name['version']}.dist-info/RECORD"].decode().splitlines():
        name, digest, _ = line.rsplit(",", 2)
        expect(name in wheel.files, f"RECORD names {name}, which is not there")
        if digest:
            hashed = base64.urlsafe_b64encode(hashlib.sha256(wheel.files[name]).digest()).rstrip(b"=").decode()
            expect(digest == f"sha256={hashed}", f"{name} is not what RECORD says")
    return f"{len(wheel.files)} files, one extension, no bundled library"


def check_libraries(wheel: Wheel) -> str:
    needed = {tag.needed for tag in wheel.elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
    expect(needed <= LIBRARIES, f"needs {sorted(needed - LIBRARIES)}")
    return " ".join(sorted(needed))


def check_hardening(wheel: Wheel) -> str:
    segments = {segment["p_type"]: segment for segment in wheel.elf.iter_segments()}
    expect("PT_GNU_STACK" in segments and not segments["PT_GNU_STACK"]["p_flags"] & _EXECUTABLE, "executable stack")
    expect("PT_GNU_RELRO" in segments, "no RELRO")
    both = _EXECUTABLE | _WRITABLE
    found = [segment for segment in wheel.elf.iter_segments("PT_LOAD") if segment["p_flags"] & both == both]
    expect(not found, f"{len(found)} segments that are writable and executable")
    tags = {tag.entry.d_tag: tag.entry.d_val for tag in wheel.elf.get_section_by_name(".dynamic").iter_tags()}
    expect("DT_BIND_NOW" in tags or tags.get("DT_FLAGS", 0) & _BIND_NOW, "no BIND_NOW")
    for tag in ("DT_RPATH", "DT_RUNPATH", "DT_TEXTREL"):
        expect(tag not in tags, f"has {tag}")
    return "stack not executable, nothing both writable and executable, RELRO, BIND_NOW, no RPATH, no TEXTREL"


def check_symbols(wheel: Wheel) -> str:
    symbols = wheel.elf.get_section_by_name(".dynsym").iter_symbols()
    defined = sorted(symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name)
    expect(defined == ["PyInit__C"], f"exports {defined[:10]}")
    expect(wheel.elf.get_section_by_name(".symtab") is None, "not stripped")
    return "exports PyInit__C alone, stripped"


def check_cuda(wheel: Wheel) -> str:
    image = wheel.image("cuda", MAGIC)
    if not image:
        return "none"
    entries = read_fat_binary(image)
    archs = {entry.arch for entry in entries}
    expect(archs == set(CUDA_ARCHS), f"archs differ from ci/matrix.json in {sorted(archs ^ set(CUDA_ARCHS))}")
    for entry in entries:
        number = entry.arch.partition("_")[2]
        if entry.is_ptx:
            allowed = tuple(map(int, MATRIX["cuda"]["ptx_versions"][number].split(".")))
            version = entry.ptx_version
            expect(version <= allowed, f"{entry.arch}: PTX {_dotted(version)}, newer than {_dotted(allowed)}")
        else:
            newest = 7 if int(number) < 100 else 8
            found = entry.abi_version
            expect(found <= newest, f"{entry.arch}: cubin ABI {found}, which drivers of CUDA 12 may not load")
    details = (
        f"{entry.arch} ({f'PTX {_dotted(entry.ptx_version)}' if entry.is_ptx else f'ABI {entry.abi_version}'})"
        for entry in sorted(entries, key=lambda entry: CUDA_ARCHS.index(entry.arch))
    )
    return " ".join(details)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_rocm(wheel: Wheel) -> str:
    image = wheel.image("rocm", BUNDLE)
    if not image:
        return "none"
    bundle = read_bundle(image)
    expect(list(bundle) == list(ROCM_ARCHS), f"archs differ from ci/matrix.json: {list(bundle)}")
    kernels = set()
    for arch, data in bundle.items():
        found = check_code_object(data, arch, ROCM_ARCHS[arch], CODE_OBJECT_VERSION)
        kernels.add(tuple(sorted(found.kernels)))
    expect(len(kernels) == 1, "the archs have different kernels")
    waves = " ".join(f"{arch} (wave{size})" for arch, size in ROCM_ARCHS.items())
    return f"{waves}, code object v{CODE_OBJECT_VERSION}, {len(kernels.pop())} kernels each"


CHECKS: dict[str, Callable[[Wheel], str]] = {
    "version": check_version,
    "size": check_size,
    "tag": check_tag,
    "contents": check_contents,
    "libraries": check_libraries,
    "hardening": check_hardening,
    "symbols": check_symbols,
    "cuda": check_cuda,
    "rocm": check_rocm,
}


def check(path: Path) -> Iterator[tuple[str, bool, str]]:
    """Per check its name, whether the wheel passes it, and what was found."""
    wheel = Wheel(path)
    for name, function in CHECKS.items():
        try:
            yield name, True, function(wheel)
        except (Fault, FormatError) as fault:
            yield name, False, str(fault)


def main(paths: list[str]) -> int:
    failed = 0
    for path in map(Path, paths):
        print(path.name)
        for name, passed, found in check(path):
            failed += not passed
            print(f"  {'ok  ' if passed else 'FAIL'} {name:<10} {found}")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
