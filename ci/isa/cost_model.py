"""A model of what the AMD item copy costs: counts from the disassembly, and two constants fitted to published figures.

Nothing here was measured on an AMD GPU by this project.
"""

import math
from dataclasses import dataclass

from .amd import WIDE, AmdKernel

KERNEL = "hisparse_copy_items"  # the copy alone
ITEM_SIZES = (512, 576, 584, 656, 1024, 1152)  # bytes
NARROW = 8  # bytes of a narrow step's load

# Published for MI355X (gfx950, wave 64): changes of the time when 16-byte steps replace 8-byte steps.
SLOWER_AT_512 = (0.14, 0.22)  # without the gate
FASTER_AT_1024 = 0.199  # batch 1
FASTER_AT_1024_BATCH_10 = 0.128
FLAT_FROM_BATCH = 24


@dataclass(frozen=True)
class CopyLoop:
    """One round of the copy: what a wavefront issues before it waits, as read from a kernel's disassembly."""

    wavefront_size: int
    items: int  # a round takes one 16-byte step of each
    narrow_steps: int  # of each item

    @classmethod
    def of(cls, kernel: AmdKernel) -> "CopyLoop":
        loads = kernel.batches[0].by_width
        items = loads[WIDE]
        return cls(kernel.metadata[".wavefront_size"], items, loads[NARROW] // items)


@dataclass(frozen=True)
class ItemCopy:
    """How one item of `size` bytes travels. `aligned`: both of its rows lie on 16 bytes."""

    loop: CopyLoop
    size: int
    gate: bool = True
    aligned: bool = True

    @property
    def wide_bytes(self) -> int:
        """What goes in 16-byte steps: with the gate, steps that fill the wavefront, without it all that can."""
        if not self.aligned:
            return 0
        step = self.loop.wavefront_size * WIDE
        return self.size - self.size % (step if self.gate else WIDE)

    @property
    def wide_steps(self) -> int:
        return -(-self.wide_bytes // (self.loop.wavefront_size * WIDE))

    @property
    def narrow_steps(self) -> int:
        return -(-((self.size - self.wide_bytes) // NARROW) // self.loop.wavefront_size)

    @property
    def byte_steps(self) -> int:
        return int(self.size % NARROW > 0)

    @property
    def loads(self) -> int:
        """Load instructions of a wavefront for one item: its steps."""
        return self.wide_steps + self.narrow_steps + self.byte_steps

    @property
    def rounds(self) -> int:
        return max(self.wide_steps, -(-self.narrow_steps // self.loop.narrow_steps), self.byte_steps)

    @property
    def busy_lanes(self) -> float:
        """Share of the lanes of all its loads that move something."""
        moved = self.wide_bytes // WIDE + (self.size - self.wide_bytes) // NARROW + self.size % NARROW
        return moved / (self.loads * self.loop.wavefront_size)

    @property
    def round_trips(self) -> float:
        """Host round trips exposed per item: a round of several items waits once."""
        return self.rounds / self.loop.items

    @property
    def bytes_in_flight_per_lane(self) -> int:
        """At most, in a round."""
        narrow = min(self.narrow_steps, self.loop.narrow_steps)
        return self.loop.items * (WIDE * min(self.wide_steps, 1) + NARROW * narrow + self.byte_steps)

    @property
    def bytes_in_flight_per_wave(self) -> int:
        """In the first, largest round."""
        lanes = self.loop.wavefront_size
        narrow = min(self.size - self.wide_bytes, self.loop.narrow_steps * lanes * NARROW)
        return self.loop.items * (min(self.wide_bytes, lanes * WIDE) + narrow)

    @property
    def slots(self) -> int:
        """Lane slots, in units of 8 bytes on every lane. A lane that moves nothing takes its slot all the same."""
        return 2 * self.wide_steps + self.narrow_steps + self.byte_steps


@dataclass(frozen=True)
class Constants:
    """Of time = fixed + round_trip * round trips exposed + slot * slots, in units of the published loop's time for one
    item of 512 bytes in one 8-byte step."""

    fixed: float
    round_trip: float
    slot: float

    @classmethod
    def fit(cls, slower_at_512: float) -> "Constants":
        # 512 B: one step either way, and one slot more with 16 bytes a lane.
        slot = slower_at_512
        # 1024 B: two slots either way, one step instead of two: round_trip = faster * (1 + round_trip + slot).
        round_trip = FASTER_AT_1024 * (1 + slot) / (1 - FASTER_AT_1024)
        return cls(1 - round_trip - slot, round_trip, slot)

    def time(self, copy: ItemCopy) -> float:
        """Of this project's loop."""
        return self.fixed + self.round_trip * copy.round_trips + self.slot * copy.slots

    def published_time(self, copy: ItemCopy) -> float:
        """Of the loop that was published, taken to wait for each step of each item before the next."""
        return self.fixed + self.round_trip * copy.loads + self.slot * copy.slots


FITS = tuple(Constants.fit(value) for value in (SLOWER_AT_512[0], sum(SLOWER_AT_512) / 2, SLOWER_AT_512[1]))


def fabric_time_per_request() -> float:
    """What one request's bytes take of the host fabric, as a share of the narrow copy's time at batch 1 (1024 B): at
    batch 10 the wide copy waits for the fabric, and the narrow one does not yet."""
    return (1 - FASTER_AT_1024_BATCH_10) / 10


def full_fabric_batch() -> int:
    """The smallest batch at which the narrow copy waits for the fabric too."""
    return math.ceil(1 / fabric_time_per_request())


def gain_at_1024(batch: int) -> float:
    """How much less time the wide copy takes: the copies of a batch overlap until the fabric is full."""
    fabric = batch * fabric_time_per_request()
    return 1 - max(1 - FASTER_AT_1024, fabric) / max(1, fabric)
