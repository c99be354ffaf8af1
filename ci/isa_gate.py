#!/usr/bin/env python3
"""Inspects the device code that is shipped: every AMD code object and every NVIDIA cubin, from its disassembly.

    python3 ci/isa_gate.py FILE          a wheel, an extension, a bundle, a code object (.co) or a fat binary
    python3 ci/isa_gate.py --write FILE  also writes what was found to docs/isa.md
    python3 ci/isa_gate.py --setup       sets up the disassemblers, from PyPI wheels, where they are not there yet

Prints each rule that is broken and where; exits with 1 then. ci/isa/amd_rules.py and ci/isa/nvidia.py state the rules.
Needs pyelftools.
"""

import argparse
import sys
from pathlib import Path

from hisparse_build.code_objects import FormatError
from isa import amd, amd_rules, nvidia, report
from isa.disassemblers import MissingDisassembler, set_up
from isa.images import read_images

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "isa.md"


def inspect(path: Path, write: bool) -> int:
    images = read_images(path)
    amd_kernels = [kernel for data in images.code_objects.values() for kernel in amd.read_kernels(data)]
    nvidia_kernels = nvidia.read_kernels(images.fat_binary) if images.fat_binary else []
    found = [violation for kernel in amd_kernels for violation in amd_rules.violations(kernel)]
    found += [violation for kernel in nvidia_kernels for violation in nvidia.violations(kernel)]

    for violation in found:
        print(violation)
    for name, kernels in {"AMD": amd_kernels, "NVIDIA": nvidia_kernels}.items():
        if archs := list(dict.fromkeys(kernel.arch for kernel in kernels)):
            print(f"{name}: {len(kernels)} kernels for {' '.join(archs)}")
    print(f"ISA gate: {len(found)} broken rules" if found else "ISA gate: passed")
    if write and found:
        print(f"{DOCUMENT.name} is left as it was")
    elif write:
        head, _ = report.split(DOCUMENT)
        compiler = amd.compiler_of(next(iter(images.code_objects.values())))
        assembler = nvidia.assembler_of(images.fat_binary)
        DOCUMENT.write_text(head + "\n" + report.document(amd_kernels, compiler, nvidia_kernels, assembler))
        print(f"wrote {DOCUMENT}")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Inspects the device code that is shipped.")
    parser.add_argument("file", type=Path, nargs="?", help="wheel, extension, bundle, code object or fat binary")
    parser.add_argument("--setup", action="store_true", help="set up the disassemblers first")
    parser.add_argument("--write", action="store_true", help="write docs/isa.md")
    options = parser.parse_args()
    if options.setup:
        set_up()
    elif options.file is None:
        parser.error("name a file to inspect")
    return inspect(options.file, options.write) if options.file else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FormatError, MissingDisassembler, OSError) as error:
        sys.exit(f"error: {error}")
