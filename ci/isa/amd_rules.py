"""What the code of every AMD kernel must keep."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hisparse_build.matrix import ROCM_ARCHS

from .amd import WIDE, AmdKernel
from .amd_limits import BLOCK_THREADS, STATIC_LDS_BYTES, most_vgprs, waves_by_sgprs, waves_by_vgprs

LEAST_IN_FLIGHT = 4  # wide loads of a wavefront before it waits for the first


@dataclass(frozen=True)
class Violation:
    arch: str
    kernel: str
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.arch} {self.kernel}: {self.rule}: {self.what}"


def _with_mnemonic(kernel: AmdKernel, *prefixes: str) -> Iterator[str]:
    for instruction in kernel.instructions:
        if instruction.mnemonic.startswith(prefixes):
            yield f"{instruction.text} at {instruction.address:#x}"


def decoded(kernel: AmdKernel) -> Iterator[str]:
    for place in _with_mnemonic(kernel, ".long"):
        yield f"no instruction of {kernel.arch}: {place}"


def wavefront_size(kernel: AmdKernel) -> Iterator[str]:
    found, expected = kernel.metadata[".wavefront_size"], ROCM_ARCHS[kernel.arch]
    if found != expected:
        yield f"{found}, expected {expected}"


def scratch(kernel: AmdKernel) -> Iterator[str]:
    size = kernel.metadata[".private_segment_fixed_size"]
    if size or kernel.metadata[".uses_dynamic_stack"]:
        yield f"{size} bytes of private memory"
    yield from _with_mnemonic(kernel, "scratch_", "buffer_load_", "buffer_store_")


def spills(kernel: AmdKernel) -> Iterator[str]:
    for kind in ("vgpr", "sgpr"):
        if count := kernel.metadata[f".{kind}_spill_count"]:
            yield f"{count} {kind.upper()}s"


def calls(kernel: AmdKernel) -> Iterator[str]:
    yield from _with_mnemonic(kernel, "s_swappc_", "s_setpc_", "s_call_")


def flat_access(kernel: AmdKernel) -> Iterator[str]:
    """A pointer of unknown kind is accessed so, one into shared memory too."""
    yield from _with_mnemonic(kernel, "flat_")


def wide_loads(kernel: AmdKernel) -> Iterator[str]:
    marks = " ".join(kernel.marks)
    if not kernel.wide_loads:
        yield f"no {WIDE}-byte load with {marks}"
    places = {load.place for load in kernel.wide_loads}
    for store in kernel.wide_stores:
        for source in kernel.sources(store):
            if source not in places:
                instruction = kernel.instructions[source]
                yield f"stores what is not loaded with {marks}: {instruction.text} at {instruction.address:#x}"


def wide_stores(kernel: AmdKernel) -> Iterator[str]:
    if not kernel.wide_stores:
        yield f"no {WIDE}-byte store"


def store_marks(kernel: AmdKernel) -> Iterator[str]:
    for store in kernel.stores:
        if store.marks:
            instruction = kernel.instructions[store.place]
            yield f"{instruction.text} at {instruction.address:#x}"


def loads_in_flight(kernel: AmdKernel) -> Iterator[str]:
    for batch in kernel.batches:
        if (count := batch.by_width[WIDE]) < LEAST_IN_FLIGHT:
            wait = f"{batch.wait.text} at {batch.wait.address:#x}"
            yield f"{count} of at least {LEAST_IN_FLIGHT} {WIDE}-byte loads issued before {wait}"
    seen = {load for batch in kernel.batches for load in batch.loads}
    for load in kernel.wide_loads:
        if load not in seen:
            instruction = kernel.instructions[load.place]
            yield f"no wait found for {instruction.text} at {instruction.address:#x}"


def block_size(kernel: AmdKernel) -> Iterator[str]:
    if (size := kernel.metadata[".max_flat_workgroup_size"]) < BLOCK_THREADS:
        yield f"blocks of at most {size} threads, expected {BLOCK_THREADS}"


def vgprs(kernel: AmdKernel) -> Iterator[str]:
    count, limit = kernel.metadata[".vgpr_count"], most_vgprs(kernel)
    if count > limit:
        yield f"{count}, but a block of {BLOCK_THREADS} threads has {limit}"


def sgprs(kernel: AmdKernel) -> Iterator[str]:
    if waves_by_sgprs(kernel) < waves_by_vgprs(kernel):
        yield f"{kernel.metadata['.sgpr_count']} allow fewer wavefronts than the vector registers"


def static_lds(kernel: AmdKernel) -> Iterator[str]:
    if (size := kernel.metadata[".group_segment_fixed_size"]) > STATIC_LDS_BYTES:
        yield f"{size} bytes, expected at most {STATIC_LDS_BYTES}"


Rule = Callable[[AmdKernel], Iterator[str]]
RULES: dict[str, Rule] = {
    "decoded": decoded,
    "wavefront-size": wavefront_size,
    "scratch": scratch,
    "spills": spills,
    "calls": calls,
    "flat-access": flat_access,
    "store-marks": store_marks,
    "block-size": block_size,
    "vgprs": vgprs,
    "sgprs": sgprs,
    "static-lds": static_lds,
}
# Of kernels that copy items 16 bytes at a time.
WIDE_COPY_RULES: dict[str, Rule] = {
    "wide-loads": wide_loads,
    "wide-stores": wide_stores,
    "loads-in-flight": loads_in_flight,
}
# Kernels that promise no such copy.
WITHOUT_WIDE_COPY = frozenset(
    {"hisparse_translate", "hisparse_check_swap_in", "hisparse_check_indices", "hisparse_copy_items_plain_loads"}
)


def violations(kernel: AmdKernel) -> Iterator[Violation]:
    if not kernel.metadata:
        yield Violation(kernel.arch, kernel.name, "calls", "a function that is no kernel")
        return
    rules = RULES if kernel.name in WITHOUT_WIDE_COPY else RULES | WIDE_COPY_RULES
    for name, rule in rules.items():
        for what in rule(kernel):
            yield Violation(kernel.arch, kernel.name, name, what)
