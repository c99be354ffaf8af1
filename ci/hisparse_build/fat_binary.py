"""The fat binary that nvcc writes: code objects for NVIDIA GPUs (cubins) and PTX."""

import re
import struct
from dataclasses import dataclass
from functools import cached_property

from .code_objects import FormatError

MAGIC = struct.pack("<I", 0xBA55ED50)
_KINDS = {1: "compute", 2: "sm"}
_MACHINE_CUDA = 190


@dataclass(frozen=True)
class Entry:
    arch: str  # "sm_90" of a cubin, "compute_80" of PTX
    data: bytes

    @property
    def is_ptx(self) -> bool:
        return self.arch.startswith("compute_")

    @cached_property
    def ptx_version(self) -> tuple[int, int]:
        if found := re.search(rb"^\.version (\d+)\.(\d+)", self.data, re.MULTILINE):
            return int(found[1]), int(found[2])
        raise FormatError(f"{self.arch}: PTX that does not say its version")

    @property
    def abi_version(self) -> int:
        """Of a cubin. Drivers of CUDA 12 load 7; those for which a GPU needs 12.8 or later, 8 as well."""
        if self.data[:4] != b"\x7fELF" or struct.unpack_from("<H", self.data, 18)[0] != _MACHINE_CUDA:
            raise FormatError(f"{self.arch}: not a cubin")
        return self.data[8]


def read_fat_binary(data: bytes) -> list[Entry]:
    """The entries of a fat binary that starts at the first byte and is not compressed."""
    if not data.startswith(MAGIC):
        raise FormatError("not a fat binary")
    place, size = struct.unpack_from("<HQ", data, 6)
    end, entries = place + size, []
    while place < end:
        kind, header, size, packed = struct.unpack_from("<H2xIQI", data, place)
        (number,) = struct.unpack_from("<I", data, place + 28)
        if kind not in _KINDS:
            raise FormatError(f"an entry of unknown kind {kind}")
        if packed != 0:
            raise FormatError(f"{_KINDS[kind]}_{number} is compressed")
        entries.append(Entry(f"{_KINDS[kind]}_{number}", data[place + header : place + header + size]))
        place += header + size
    return entries
