"""docs/isa.md: the tables, and the cost model beside them."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from . import cost_model
from .amd import WIDE, AmdKernel
from .amd_limits import BLOCK_THREADS, most_vgprs, waves_per_compute_unit
from .cost_model import FITS, CopyLoop, ItemCopy
from .nvidia import REGISTERS, NvidiaKernel

MARKER = "<!-- From here on written by `python3 ci/isa_gate.py --write`. -->\n"


def table(header: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    yield header
    yield "|" + "---|" * header.count(" | ") + "---|"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def _in_flight(kernel: AmdKernel) -> str:
    """The fewest loads in flight at any wait, by bytes."""
    if not kernel.batches:
        return "-"
    least = min(kernel.batches, key=lambda batch: (batch.by_width[WIDE], len(batch.loads)))
    return " + ".join(f"{count} x {width} B" for width, count in least.by_width.items())


def amd_section(kernels: list[AmdKernel], compiler: str) -> str:
    header = (
        "| arch | kernel | 16-byte loads | their marks | 16-byte stores | in flight at the first wait "
        "| VGPRs (limit) | SGPRs | static LDS, bytes | waves per CU |"
    )
    rows = (
        (
            kernel.arch,
            f"`{kernel.name}`",
            len(kernel.wide_loads),
            f"`{' '.join(kernel.marks)}`" if kernel.wide_loads else "-",
            len(kernel.wide_stores),
            _in_flight(kernel),
            f"{kernel.metadata['.vgpr_count']} ({most_vgprs(kernel)})",
            kernel.metadata[".sgpr_count"],
            kernel.metadata[".group_segment_fixed_size"],
            waves_per_compute_unit(kernel),
        )
        for kernel in kernels
    )
    return "\n".join(["## AMD", "", f"Compiled by {compiler}.", "", *table(header, rows), ""])


def nvidia_section(kernels: list[NvidiaKernel], assembler: str) -> str:
    limit = REGISTERS // BLOCK_THREADS
    header = (
        "| arch | kernel | 16-byte loads | 16-byte stores | most loads before a store "
        f"| registers (limit {limit}) | stack, bytes |"
    )
    rows = (
        (one.arch, f"`{one.name}`", one.wide_loads, one.wide_stores, max(one.batches), one.registers, one.stack)
        for one in sorted(kernels, key=lambda one: (int(one.arch.removeprefix("sm_")), one.name))
    )
    return "\n".join(["## NVIDIA", "", f"Assembled by {assembler}.", "", *table(header, rows), ""])


def _percent(values: Iterable[float]) -> str:
    """The range of some shares."""
    low, high = (f"{100 * value:+.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0") for value in _ends(values))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _ends(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def _copies(loop: CopyLoop) -> Iterator[tuple[str, ItemCopy, ItemCopy]]:
    """For each item size: with the gate, without it."""
    for size in cost_model.ITEM_SIZES:
        for aligned in (True, False) if size % WIDE else (True,):
            where = "" if size % WIDE == 0 else ", rows on 16 bytes" if aligned else ", other rows"
            yield f"{size} B{where}", *(ItemCopy(loop, size, gate, aligned) for gate in (True, False))


def _counts(loop: CopyLoop) -> Iterator[str]:
    header = (
        "| item | gate | loads per item: 16 B + 8 B + 1 B | lanes that move something | bytes in flight per lane "
        "| bytes in flight per wave | round trips exposed per item |"
    )
    rows = []
    for item, on, off in _copies(loop):
        differ = (on.loads, on.slots) != (off.loads, off.slots)
        for gate, copy in {"on": on, "off": off}.items() if differ else [("on and off", on)]:
            loads = f"{copy.wide_steps} + {copy.narrow_steps} + {copy.byte_steps}"
            in_flight = copy.bytes_in_flight_per_lane, copy.bytes_in_flight_per_wave
            rows.append((item, gate, loads, f"{100 * copy.busy_lanes:.0f} %", *in_flight, f"{copy.round_trips:g}"))
    return table(header, rows)


def _constants() -> Iterator[str]:
    def span(name: str) -> str:
        low, high = _ends(getattr(fit, name) for fit in FITS)
        return f"{low:.2f} to {high:.2f}"

    fabric = cost_model.fabric_time_per_request()
    rows = [
        ("slot", span("slot"), "the loss at 512 B: in the same number of steps, one slot more"),
        ("round trip", span("round_trip"), "the gain at 1024 B, batch 1: one step less, the same slots"),
        ("fixed", span("fixed"), "what is left of 1: planning, launch, all that does not depend on the copy's steps"),
        ("fabric", f"{fabric:.3f}", "the gain at 1024 B, batch 10; unit: narrow copy, batch 1"),
    ]
    return table("| constant | value | fitted to |", rows)


def _published(loop: CopyLoop) -> Iterator[str]:
    def change(size: int) -> str:
        # Rows that are not aligned go in 8-byte steps.
        narrow, wide = ItemCopy(loop, size, aligned=False), ItemCopy(loop, size, gate=False)
        return _percent(fit.published_time(wide) / fit.published_time(narrow) - 1 for fit in FITS)

    def gain(batch: int) -> str:
        return _percent([-cost_model.gain_at_1024(batch)])

    flat = cost_model.FLAT_FROM_BATCH
    rows = [
        ("512 B, no gate", _percent(cost_model.SLOWER_AT_512), change(512), "fitted"),
        ("1024 B, batch 1", _percent([-cost_model.FASTER_AT_1024]), change(1024), "fitted"),
        ("1024 B, batch 10", _percent([-cost_model.FASTER_AT_1024_BATCH_10]), gain(10), "fitted"),
        (f"1024 B, from batch {flat} on", "within 0.5 %", gain(flat), "predicted"),
        ("non-temporal hint alone", "81.1 against 81.2 us", "no change, as no count changes", "predicted"),
    ]
    return table("| 16-byte steps instead of 8-byte steps | published change of the time | model | |", rows)


def _gate(loop: CopyLoop) -> Iterator[str]:
    rows = []
    for item, on, off in _copies(loop):
        theirs = _percent(fit.published_time(off) / fit.published_time(on) - 1 for fit in FITS)
        ours = _percent(fit.time(off) / fit.time(on) - 1 for fit in FITS)
        rows.append((item, theirs, ours))
    return table("| item | published loop without its gate | this loop without its gate |", rows)


_MODEL = """## Cost model of the AMD copy

**A model, not a measurement.** This project has timed nothing on an AMD GPU. The counts are exact and follow from the
disassembly. The times rest on constants fitted to figures that were published for one GPU (MI355X: gfx950, wave 64),
for copies from the host to the device, and for another loop.

**Counts.** A step is one load instruction of a wavefront. A round is what a wavefront issues before it waits: for each
of {items} items one 16-byte step, or {narrow_steps} steps of 8 bytes, and the bytes that are left. So an item exposes
1/{items} of a host round trip for each round that it takes. With the gate an item takes 16-byte steps only as far as
they fill the wavefront. The non-temporal hint changes no count.

Wave 64:

{wave_64}

Wave 32:

{wave_32}

**Times.** time = fixed + round trip x round trips exposed + slot x lane slots; the unit is the published loop's time
for one item of 512 B in one 8-byte step. A step of 8 bytes takes one lane slot and one of 16 bytes takes two, however
many of its lanes move something. Steps alone do not give the loss at 512 B, where both ways take one; the slot stands
for what idle lanes cost, whatever its cause. The published loop is taken to wait for each step before the next.

{constants}

A batch takes its copy's time or its bytes' time on the host fabric, whichever is longer. From batch {full} on the
fabric leaves nothing to gain. That it was published as flat from batch {flat} on is the check of this part.

{published}

What these constants say about the gate at wave 64 (a positive number: the gate is right):

{gate}

If they hold, the published loop would be better off without its gate at 576 and 656 B, where one part-filled 16-byte
step replaces two steps that wait for each other. In this loop both are in flight together, so the gate costs nothing
there. At wave 32 the constants are not known; only the counts are given.
"""


def model_section(kernels: list[AmdKernel]) -> str:
    copies = [CopyLoop.of(kernel) for kernel in kernels if kernel.name == cost_model.KERNEL]
    loops = {loop.wavefront_size: loop for loop in copies}
    if len(set(copies)) != len(loops):
        raise ValueError(f"{cost_model.KERNEL} differs between architectures of one wavefront size: {copies}")
    wave_64, wave_32 = loops[64], loops[32]
    return _MODEL.format(
        items=wave_64.items,
        narrow_steps=wave_64.narrow_steps,
        wave_64="\n".join(_counts(wave_64)),
        wave_32="\n".join(_counts(wave_32)),
        constants="\n".join(_constants()),
        full=cost_model.full_fabric_batch(),
        flat=cost_model.FLAT_FROM_BATCH,
        published="\n".join(_published(wave_64)),
        gate="\n".join(_gate(wave_64)),
    )


def document(kernels: list[AmdKernel], compiler: str, nvidia: list[NvidiaKernel], assembler: str) -> str:
    """All that --write writes."""
    return "\n".join([amd_section(kernels, compiler), nvidia_section(nvidia, assembler), model_section(kernels)])


def split(path: Path) -> tuple[str, str]:
    """What is written by hand, and what is not."""
    head, marker, generated = path.read_text().partition(MARKER)
    return head + (marker or MARKER), generated.lstrip("\n")
