"""Registers and wavefronts of AMD's compute units, as LLVM's AMDGPU target has them."""

from dataclasses import dataclass

from .amd import AmdKernel

BLOCK_THREADS = 1024  # the largest block that the kernels promise
STATIC_LDS_BYTES = 0  # shared memory is sized at the launch, and nothing else may take from it


@dataclass(frozen=True)
class ComputeUnit:
    """Of one architecture, at the wavefront size that the kernels have there."""

    simds: int
    vgprs: int  # of a SIMD, for each lane; accumulation registers are among them
    vgpr_step: int  # what one wavefront's share is a multiple of
    waves: int  # most, on a SIMD
    sgprs: int | None  # of a SIMD; None: they never limit the wavefronts
    sgpr_step: int = 16


CDNA = ComputeUnit(simds=4, vgprs=512, vgpr_step=8, waves=8, sgprs=800)
RDNA = ComputeUnit(simds=2, vgprs=1536, vgpr_step=24, waves=16, sgprs=None)  # wave 32, large register files only
COMPUTE_UNITS = dict.fromkeys(("gfx90a", "gfx942", "gfx950"), CDNA)
COMPUTE_UNITS |= dict.fromkeys(("gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"), RDNA)


def _round_up(count: int, step: int) -> int:
    return -(-max(count, 1) // step) * step


def waves_by_vgprs(kernel: AmdKernel) -> int:
    """Wavefronts on a SIMD that the vector registers allow."""
    unit = COMPUTE_UNITS[kernel.arch]
    return min(unit.waves, unit.vgprs // _round_up(kernel.metadata[".vgpr_count"], unit.vgpr_step))


def waves_by_sgprs(kernel: AmdKernel) -> int:
    unit = COMPUTE_UNITS[kernel.arch]
    if unit.sgprs is None:
        return unit.waves
    return min(unit.waves, unit.sgprs // _round_up(kernel.metadata[".sgpr_count"], unit.sgpr_step))


def waves_per_compute_unit(kernel: AmdKernel) -> int:
    """Wavefronts on a compute unit that the registers allow; shared memory may allow fewer at a launch."""
    return min(waves_by_vgprs(kernel), waves_by_sgprs(kernel)) * COMPUTE_UNITS[kernel.arch].simds


def most_vgprs(kernel: AmdKernel) -> int:
    """With more, a block of BLOCK_THREADS does not fit."""
    unit = COMPUTE_UNITS[kernel.arch]
    # In workgroup processor mode a block has both compute units of the pair.
    simds = unit.simds * 2 if kernel.metadata.get(".workgroup_processor_mode") else unit.simds
    waves = -(-BLOCK_THREADS // kernel.metadata[".wavefront_size"] // simds)
    return unit.vgprs // waves // unit.vgpr_step * unit.vgpr_step
