"""AMD kernels as disassembled: what they load and store, how much is in flight, and where stored data comes from."""

import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from elftools.elf.elffile import ELFFile
from hisparse_build.code_objects import read_code_object

from .disassemblers import AmdDisassembler, Instruction

# What the assembler writes for a non-temporal load, by architecture or family.
NON_TEMPORAL = {
    "gfx90a": ("glc", "slc"),
    "gfx942": ("nt",),
    "gfx950": ("nt",),
    "gfx11": ("slc", "dlc"),
    "gfx12": ("th:TH_LOAD_NT",),
}
WIDE = 16  # bytes

_TEMPORAL_HINT = re.compile(r"(?<= )(?:nt|glc|slc|dlc|th:\w+)(?= |$)")
_VECTOR_REGISTERS = re.compile(r"\b([va])(?:\[(\d+):(\d+)\]|(\d+))")
_WIDTHS = {"x4": 16, "b128": 16, "x3": 12, "b96": 12, "x2": 8, "b64": 8, "b32": 4, "dword": 4}
_WIDTHS |= {"short": 2, "16": 2, "byte": 1, "8": 1}
_WRITES_VECTOR_REGISTERS = ("v_", "global_load_", "ds_", "buffer_load_", "flat_load_", "scratch_load_")


@dataclass(frozen=True)
class Access:
    """A load from, or a store to, global memory."""

    place: int  # of the instruction in its kernel
    is_load: bool
    bytes: int  # per lane
    marks: tuple[str, ...]
    data: frozenset[str]  # vector registers


@dataclass(frozen=True)
class Batch:
    """The loads in flight at the first wait for a wide one of them."""

    wait: Instruction
    loads: tuple[Access, ...]  # wide ones and those issued after the first of them

    @cached_property
    def by_width(self) -> dict[int, int]:
        """How many loads, by bytes per lane."""
        return dict(sorted(Counter(load.bytes for load in self.loads).items(), reverse=True))


@dataclass(frozen=True)
class AmdKernel:
    arch: str
    name: str
    metadata: Mapping[str, Any]  # its entry in amdhsa.kernels
    instructions: tuple[Instruction, ...]

    @property
    def marks(self) -> tuple[str, ...]:
        """Of this architecture's non-temporal loads."""
        return NON_TEMPORAL[self.arch if self.arch in NON_TEMPORAL else self.arch[:5]]

    @cached_property
    def accesses(self) -> dict[int, Access]:
        """By place."""
        found = (_access(place, instruction) for place, instruction in enumerate(self.instructions))
        return {access.place: access for access in found if access}

    @cached_property
    def wide_loads(self) -> list[Access]:
        """16-byte loads with non-temporal marks: those of the item copy."""
        accesses = self.accesses.values()
        return [one for one in accesses if one.is_load and one.bytes == WIDE and one.marks == self.marks]

    @cached_property
    def stores(self) -> list[Access]:
        return [access for access in self.accesses.values() if not access.is_load]

    @cached_property
    def wide_stores(self) -> list[Access]:
        return [store for store in self.stores if store.bytes == WIDE]

    @cached_property
    def _next(self) -> list[tuple[int, ...]]:
        """The places that can follow each place in a wavefront that takes every wide load and store.

        A copy's load and store stand under the same condition, which no analysis of single branches sees. So where one
        way of a branch leads to a block with a wide load or store and the other does not, the other is left out.
        """
        places = {instruction.address: place for place, instruction in enumerate(self.instructions)}
        following: list[tuple[int, ...]] = []
        for place, instruction in enumerate(self.instructions):
            target = _branch_target(instruction)
            ways = () if target is None else (places[target],)
            falls_through = instruction.mnemonic not in ("s_branch", "s_endpgm", "s_setpc_b64")
            following.append((*ways, place + 1) if falls_through and place + 1 < len(places) else ways)

        starts = {0, *(place for ways in following if len(ways) != 1 for place in ways)}
        starts |= {ways[0] for place, ways in enumerate(following) if len(ways) == 1 and ways[0] != place + 1}
        wide = {access.place for access in (*self.wide_loads, *self.wide_stores)}
        block, wide_blocks = 0, set()
        for place in range(len(following)):
            block = place if place in starts else block
            if place in wide:
                wide_blocks.add(block)
        for place, ways in enumerate(following):
            chosen = tuple(way for way in ways if way in wide_blocks)
            if len(ways) == 2 and len(chosen) == 1:
                following[place] = chosen
        return following

    @cached_property
    def batches(self) -> list[Batch]:
        """One for each wait that a wide load makes necessary."""
        wide = sum(1 << load.place for load in self.wide_loads)
        before = {0: 0}  # loads that may be in flight before each place, as bits
        work = [0]
        while work:
            place = work.pop()
            in_flight = before[place]
            access = self.accesses.get(place)
            if access and access.is_load and (in_flight | 1 << place) & wide:
                in_flight |= 1 << place
            if loads_left_in_flight(self.instructions[place]) == 0:
                in_flight = 0
            for after in self._next[place]:
                if before.get(after, -1) | in_flight != before.get(after):
                    before[after] = before.get(after, 0) | in_flight
                    work.append(after)
        found = []
        for place, in_flight in sorted(before.items()):
            left = loads_left_in_flight(self.instructions[place])
            if left is not None and (in_flight & wide).bit_count() > left:
                loads = tuple(load for load in self.accesses.values() if in_flight >> load.place & 1)
                found.append(Batch(self.instructions[place], loads))
        return found

    def sources(self, store: Access) -> Iterator[int]:
        """The places of the instructions that may have written what is stored."""
        preceding: dict[int, list[int]] = {}
        for place, ways in enumerate(self._next):
            for way in ways:
                preceding.setdefault(way, []).append(place)
        work, seen = list(preceding.get(store.place, ())), set()
        while work:
            place = work.pop()
            if place in seen:
                continue
            seen.add(place)
            if store.data & written_registers(self.instructions[place]):
                yield place
            else:
                work.extend(preceding.get(place, ()))


def _access(place: int, instruction: Instruction) -> Access | None:
    match = re.match(r"global_(load|store)_(\S+) (.*)", instruction.text)
    if not match:
        return None
    is_load, operands = match[1] == "load", match[3].split(", ")
    kind = re.sub("d16_|hi_", "", match[2])  # of 16 register bits, those that are loaded or stored
    width = next(size for part, size in _WIDTHS.items() if part in kind)
    marks = tuple(_TEMPORAL_HINT.findall(instruction.text))
    return Access(place, is_load, width, marks, frozenset(_registers(operands[0 if is_load else 1])))


def _registers(operand: str) -> Iterator[str]:
    for kind, first, last, single in _VECTOR_REGISTERS.findall(operand):
        for number in range(int(first or single), int(last or single) + 1):
            yield f"{kind}{number}"


def written_registers(instruction: Instruction) -> frozenset[str]:
    """Vector registers that the instruction writes."""
    halves = instruction.text.split(" :: ")  # two operations in one instruction
    operands = [half.split(None, 1)[1].split(",")[0] for half in halves if half.startswith(_WRITES_VECTOR_REGISTERS)]
    return frozenset(register for operand in operands for register in _registers(operand))


def _branch_target(instruction: Instruction) -> int | None:
    if not instruction.mnemonic.startswith(("s_branch", "s_cbranch_")):
        return None
    words = int(instruction.text.split()[-1])
    return instruction.address + 4 + 4 * (words - 0x10000 if words >= 0x8000 else words)


def loads_left_in_flight(instruction: Instruction) -> int | None:
    """How many loads may be in flight after this instruction; None where it waits for none."""
    name, _, operand = instruction.text.partition(" ")
    if name == "s_waitcnt":
        counter = re.search(r"vmcnt\((\d+)\)", operand)
        return int(counter[1]) if counter else None
    if name == "s_wait_loadcnt":
        return int(operand, 0)
    if name == "s_wait_loadcnt_dscnt":
        return int(operand, 0) >> 8
    return 0 if name in ("s_waitcnt_vmcnt", "s_wait_idle") else None


def read_kernels(data: bytes) -> list[AmdKernel]:
    """The kernels of a code object. Functions that are no kernels come as kernels without metadata."""
    code_object = read_code_object(data)
    disassembler = AmdDisassembler(code_object.arch)
    kernels = []
    with io.BytesIO(data) as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
        for symbol in table.iter_symbols():
            if symbol["st_info"]["type"] != "STT_FUNC":
                continue
            section = elf.get_section(symbol["st_shndx"])
            start = symbol["st_value"] - section["sh_addr"]
            code = section.data()[start : start + symbol["st_size"]]
            instructions = tuple(disassembler.instructions(code))
            metadata = code_object.kernels.get(symbol.name, {})
            kernels.append(AmdKernel(code_object.arch, symbol.name, metadata, instructions))
    return kernels


def compiler_of(data: bytes) -> str:
    """The compiler that a code object names as its own."""
    with io.BytesIO(data) as file:
        comment = ELFFile(file).get_section_by_name(".comment")
        names = comment.data().decode().strip("\0").split("\0") if comment else ["an unknown compiler"]
        return names[0]
