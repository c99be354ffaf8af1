"""NVIDIA kernels as disassembled, and the rules that they must keep."""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from .amd_limits import BLOCK_THREADS
from .amd_rules import LEAST_IN_FLIGHT, WITHOUT_WIDE_COPY, Violation
from .disassemblers import cuobjdump

REGISTERS = 65536  # of a multiprocessor, on every architecture of the matrix
WIDE_LOAD = "LDG.E.EF.128"  # 16 bytes, the first to leave the first-level cache
_WIDE_STORE = re.compile(r"STG\.E\.128\b")


@dataclass
class NvidiaKernel:
    arch: str
    name: str
    registers: int = 0
    stack: int = 0  # bytes
    local: int = 0
    instructions: list[str] = field(default_factory=list)

    @property
    def wide_loads(self) -> int:
        return sum(WIDE_LOAD in text for text in self.instructions)

    @property
    def wide_stores(self) -> int:
        return sum(bool(_WIDE_STORE.search(text)) for text in self.instructions)

    @property
    def batches(self) -> list[int]:
        """How many wide loads stand before each group of wide stores."""
        runs, storing = [0], False
        for text in self.instructions:
            if WIDE_LOAD in text:
                if storing:
                    runs.append(0)
                runs[-1] += 1
                storing = False
            elif _WIDE_STORE.search(text):
                storing = True
        return runs


def _dump(fat_binary: bytes, *options: str) -> list[str]:
    """What cuobjdump prints, with each option."""
    with tempfile.NamedTemporaryFile(suffix=".fatbin") as file:
        file.write(fat_binary)
        file.flush()
        return [cuobjdump(option, file.name) for option in options]


def assembler_of(fat_binary: bytes) -> str:
    """What assembled the first cubin, as the cubin names it."""
    if not fat_binary:
        return "nothing"
    found = re.search(r"Tool Version:\s+(.*)", *_dump(fat_binary, "-elf"))
    return f"ptxas, {found[1]}" if found else "an unknown assembler"


def read_kernels(fat_binary: bytes) -> list[NvidiaKernel]:
    usage, code = _dump(fat_binary, "-res-usage", "-sass")
    kernels: dict[tuple[str, str], NvidiaKernel] = {}
    arch = name = ""
    for line in usage.splitlines():
        if found := re.match(r"arch = (\w+)", line):
            arch = found[1]
        elif found := re.match(r" Function (\w+):", line):
            name = found[1]
        elif found := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            kernels[arch, name] = NvidiaKernel(arch, name, *map(int, found.groups()))
    for line in code.splitlines():
        if found := re.match(r"\s+code for (\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s+Function : (\w+)", line):
            name = found[1]
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?) ;", line):
            kernels[arch, name].instructions.append(found[1])
    return list(kernels.values())


def violations(kernel: NvidiaKernel) -> Iterator[Violation]:
    def violation(rule: str, what: str) -> Violation:
        return Violation(kernel.arch, kernel.name, rule, what)

    local = [text for text in kernel.instructions if re.search(r"\b(LDL|STL)\b", text)]
    if kernel.stack or kernel.local or local:
        yield violation(
            "spills", f"{kernel.stack} bytes of stack, {kernel.local} of local memory, {len(local)} accesses"
        )
    if kernel.registers > (limit := REGISTERS // BLOCK_THREADS):
        yield violation("registers", f"{kernel.registers}, but a block of {BLOCK_THREADS} threads has {limit}")
    if kernel.name in WITHOUT_WIDE_COPY:
        return
    if not kernel.wide_loads:
        yield violation("wide-loads", f"no {WIDE_LOAD}")
    if not kernel.wide_stores:
        yield violation("wide-stores", "no 16-byte store")
    if (most := max(kernel.batches)) < LEAST_IN_FLIGHT:
        yield violation("loads-in-flight", f"{most} of at least {LEAST_IN_FLIGHT} wide loads before the first store")
