"""Finds the device code in what is shipped: a wheel, an extension, or the files that it is built from."""

import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from hisparse_build.code_objects import FormatError, read_bundle, read_code_object

_BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_FAT_BINARY_MAGIC = struct.pack("<IH", 0xBA55ED50, 1)
_ALIGNMENT = 4096  # of each image in the extension


@dataclass
class Images:
    code_objects: dict[str, bytes] = field(default_factory=dict)  # AMD's, by architecture
    fat_binary: bytes = b""  # NVIDIA's


def read_images(path: Path) -> Images:
    data = path.read_bytes()
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            extensions = [name for name in wheel.namelist() if name.startswith("hisparse/_C") and name.endswith(".so")]
            if len(extensions) != 1:
                raise FormatError(f"{path.name} has {len(extensions)} extensions, expected one")
            data = wheel.read(extensions[0])
    if path.suffix == ".co":
        return Images({read_code_object(data).arch: data})
    images = Images()
    for start in range(0, len(data), _ALIGNMENT):
        if data.startswith(_BUNDLE_MAGIC, start):
            images.code_objects = read_bundle(data[start:])
        elif data.startswith(_FAT_BINARY_MAGIC, start):
            header, body = struct.unpack_from("<HQ", data, start + 6)
            images.fat_binary = data[start : start + header + body]
    if not images.code_objects and not images.fat_binary:
        raise FormatError(f"no device code in {path}")
    return images
