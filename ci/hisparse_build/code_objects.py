"""AMD code objects (ELF files with a metadata note) and the offload bundle that holds one per architecture.

As a program: `python -m hisparse_build.code_objects OUTPUT ARCH=FILE...` checks the code objects and bundles them.
"""

import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .matrix import CODE_OBJECT_VERSION, ROCM_ARCHS

_MACHINE_AMDGPU = 0xE0
_SEGMENT_NOTE = 4
_NOTE_AMDGPU_METADATA = 32
_BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_BUNDLE_HOST = "host-x86_64-unknown-linux-gnu-"  # an empty entry that readers of bundles expect first
_BUNDLE_PREFIX = "hipv4-amdgcn-amd-amdhsa--"
_PAGE = 4096


class FormatError(ValueError):
    """These bytes are not what they should be."""


@dataclass(frozen=True)
class CodeObject:
    arch: str
    version: int  # of the code object format
    kernels: Mapping[str, Mapping[str, Any]]  # by name, the entries of amdhsa.kernels as the compiler wrote them

    @property
    def wavefront_sizes(self) -> set[int]:
        return {kernel[".wavefront_size"] for kernel in self.kernels.values()}


def read_code_object(data: bytes) -> CodeObject:
    if data[:4] != b"\x7fELF" or struct.unpack_from("<H", data, 18)[0] != _MACHINE_AMDGPU:
        raise FormatError("not an AMD GPU code object")
    metadata = _message_pack(_metadata_note(data))
    _, _, arch = metadata["amdhsa.target"].partition("amdgcn-amd-amdhsa--")
    kernels = {kernel[".name"]: kernel for kernel in metadata["amdhsa.kernels"]}
    # Code object version N writes metadata version 1.(N - 3), and says so in the ELF header as N - 2.
    return CodeObject(arch, data[8] + 2, kernels)


def _metadata_note(data: bytes) -> bytes:
    (table,) = struct.unpack_from("<Q", data, 32)
    entry_size, entries = struct.unpack_from("<HH", data, 54)
    for header in range(table, table + entries * entry_size, entry_size):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", data, header)
        end = offset + size
        while kind == _SEGMENT_NOTE and offset + 12 <= end:
            name_size, content_size, note = struct.unpack_from("<III", data, offset)
            content = offset + 12 + (name_size + 3) // 4 * 4
            if note == _NOTE_AMDGPU_METADATA:
                return data[content : content + content_size]
            offset = content + (content_size + 3) // 4 * 4
    raise FormatError("the code object has no metadata note")


def _message_pack(data: bytes) -> Any:
    """The value that `data` encodes, in the part of MessagePack that compilers write: no floats, no binaries."""
    place = 0

    def take(form: str) -> int:
        nonlocal place
        (number,) = struct.unpack_from(form, data, place)
        place += struct.calcsize(form)
        return number

    def text(size: int) -> str:
        nonlocal place
        place += size
        return data[place - size : place].decode()

    def array(size: int) -> list[Any]:
        return [value() for _ in range(size)]

    def table(size: int) -> dict[str, Any]:
        return {value(): value() for _ in range(size)}

    constants = {0xC0: None, 0xC2: False, 0xC3: True}
    integers = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    sized = {0xD9: (text, ">B"), 0xDA: (text, ">H"), 0xDB: (text, ">I"), 0xDC: (array, ">H"), 0xDD: (array, ">I")}
    sized |= {0xDE: (table, ">H"), 0xDF: (table, ">I")}

    def value() -> Any:
        tag = take("B")
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return table(tag - 0x80)
        if tag < 0xA0:
            return array(tag - 0x90)
        if tag < 0xC0:
            return text(tag - 0xA0)
        if tag >= 0xE0:
            return tag - 0x100
        if tag in constants:
            return constants[tag]
        if tag in integers:
            return take(integers[tag])
        if tag in sized:
            read, form = sized[tag]
            return read(take(form))
        raise FormatError(f"unexpected MessagePack tag {tag:#x}")

    return value()


def check_code_object(data: bytes, arch: str, wavefront_size: int, version: int) -> CodeObject:
    """The code object, where it is what the kernels rely on; else FormatError."""
    found = read_code_object(data)
    if found.arch != arch:
        raise FormatError(f"compiled for {arch}, but the code object is for {found.arch}")
    if found.version != version:
        raise FormatError(f"{arch}: code object version {found.version}, expected {version}")
    if found.wavefront_sizes != {wavefront_size}:
        sizes = ", ".join(map(str, sorted(found.wavefront_sizes))) or "none, as there is no kernel"
        raise FormatError(f"{arch}: wavefront size {sizes}, expected {wavefront_size}")
    return found


def write_bundle(code_objects: Mapping[str, bytes]) -> bytes:
    entries = [(_BUNDLE_HOST, b"")] + [(_BUNDLE_PREFIX + arch, data) for arch, data in code_objects.items()]
    place = len(_BUNDLE_MAGIC) + 8 + sum(24 + len(name) for name, _ in entries)
    header, body = _BUNDLE_MAGIC + struct.pack("<Q", len(entries)), b""
    for name, data in entries:
        padding = -(place + len(body)) % _PAGE
        body += bytes(padding)
        header += struct.pack("<QQQ", place + len(body), len(data), len(name)) + name.encode()
        body += data
    return header + body


def read_bundle(data: bytes) -> dict[str, bytes]:
    """The code objects of an uncompressed bundle, by architecture."""
    if not data.startswith(_BUNDLE_MAGIC):
        raise FormatError("not an uncompressed offload bundle")
    (count,) = struct.unpack_from("<Q", data, len(_BUNDLE_MAGIC))
    place, code_objects = len(_BUNDLE_MAGIC) + 8, {}
    for _ in range(count):
        offset, size, name_size = struct.unpack_from("<QQQ", data, place)
        name = data[place + 24 : place + 24 + name_size].decode()
        place += 24 + name_size
        if name.startswith(_BUNDLE_PREFIX):
            code_objects[name.removeprefix(_BUNDLE_PREFIX)] = data[offset : offset + size]
    return code_objects


def main(output: str, files: Iterable[str]) -> None:
    code_objects = {arch: Path(path).read_bytes() for arch, _, path in (entry.partition("=") for entry in files)}
    checked = {
        arch: check_code_object(data, arch, ROCM_ARCHS[arch], CODE_OBJECT_VERSION)
        for arch, data in code_objects.items()
    }
    kernels = {arch: sorted(found.kernels) for arch, found in checked.items()}
    if len(set(map(tuple, kernels.values()))) != 1:
        raise FormatError(f"the architectures have different kernels: {kernels}")
    Path(output).write_bytes(write_bundle(code_objects))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except FormatError as error:
        sys.exit(f"error: {error}")
