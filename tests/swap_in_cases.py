"""Swap-in calls to test with: a valid state, in which everything that the op has no business with is garbage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import reference
from invariants import check_swap_in_invariants
from places import Guarded, assert_same, call

import hisparse

PLAN = ("miss_src", "miss_dst", "miss_count")
TABLES = ("device_buffer_tokens", "device_buffer_locs", "host_cache_locs", "lru_slots", "host_cache", "device_buffer")


@dataclass
class Row:
    """One row of a batch and the state of its request before the call."""

    seq_len: int
    top_k: Sequence[int]  # filled up with -1 to num_top_k entries
    resident: Mapping[int, int] | np.ndarray | None = None  # slot -> token; None: token p in slot p
    lru: Sequence[int] | None = None  # None: a random permutation


@dataclass
class SwapInCase:
    arrays: dict[str, Guarded]
    sizes: dict[str, int]

    def copy(self) -> SwapInCase:
        return SwapInCase({name: array.copy() for name, array in self.arrays.items()}, dict(self.sizes))

    def views(self) -> dict[str, np.ndarray]:
        return {name: array.view for name, array in self.arrays.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name].view

    def tokens(self, b: int) -> np.ndarray:
        return self["device_buffer_tokens"][self["req_pool_indices"][b], : self.sizes["hot_buffer_size"]]

    def lru(self, b: int) -> list[int]:
        return self["lru_slots"][self["req_pool_indices"][b], : self.sizes["hot_buffer_size"]].tolist()

    def slots(self, b: int) -> list[int]:
        """The output row as slots of the request; -1 where it is -1."""
        locs = self["device_buffer_locs"][self["req_pool_indices"][b], : self.sizes["hot_buffer_size"] + 1].tolist()
        return [-1 if loc == -1 else locs.index(loc) for loc in self["top_k_device_locs"][b, : self.sizes["num_top_k"]]]

    def misses(self, b: int) -> int:
        return int(self["miss_count"][b])


def make_case(
    rng: np.random.Generator,
    rows: Sequence[Row],
    *,
    num_top_k: int,
    hot_buffer_size: int,
    item_size_bytes: int = 20,
    page_size: int = 1,
    num_real_reqs: int | None = None,
    plan: bool = True,
    spare_requests: int = 3,
    index_dtypes: tuple = (np.int32, np.int64),
    pool_leads: tuple[int, int] = (0, 0),
    max_tokens: int | None = None,
    host_rows: int | None = None,
    stale_host_locs: bool = True,
) -> SwapInCase:
    """Rows from num_real_reqs on are padding: of their request index and length only garbage is left.

    With `stale_host_locs`, so it is with the host locs of tokens that are neither asked for nor resident.
    """
    batch, hot, item = len(rows), hot_buffer_size, item_size_bytes
    real = batch if num_real_reqs is None else min(max(num_real_reqs, 0), batch)
    requests = real + spare_requests
    rids = rng.permutation(requests)[:real]
    if max_tokens is None:
        max_tokens = max([1] + [row.seq_len for row in rows[:real]]) + int(rng.integers(4))
    if host_rows is None:
        host_rows = max_tokens + 5

    # Four neighbours are one access where the base and the stride of all tables allow it, as a framework's do.
    lead_unit, stride_unit = rng.choice([1, 4], 2).tolist()

    def lead(dtype) -> int:
        return int(rng.integers(4)) * lead_unit * np.dtype(dtype).itemsize

    def table(dtype, shape, widen: int = 4) -> Guarded:
        shape = (shape[0], shape[1] + int(rng.integers(widen)))
        row_stride = shape[1] + int(rng.integers(4))
        return Guarded.random(rng, dtype, shape, -(-row_stride // stride_unit) * stride_unit, lead(dtype))

    def vector(dtype, count: int) -> Guarded:
        return Guarded.random(rng, dtype, (count,), lead=lead(dtype))

    tokens = table(np.int32, (requests, hot + page_size))
    device_locs = Guarded.random(rng, np.int32, tokens.shape, tokens.strides[0], lead(np.int32))
    arrays = {
        "top_k_tokens": table(np.int32, (batch, num_top_k)),
        "device_buffer_tokens": tokens,
        "host_cache_locs": table(np.int64, (requests, max_tokens)),
        "device_buffer_locs": device_locs,
        "host_cache": Guarded.random(rng, np.uint8, (host_rows, item), lead=pool_leads[0]),
        "device_buffer": Guarded.random(rng, np.uint8, (real * (hot + page_size) + 7, item), lead=pool_leads[1]),
        "top_k_device_locs": table(np.int32, (batch, num_top_k)),
        "req_pool_indices": vector(index_dtypes[0], batch),
        "seq_lens": vector(index_dtypes[1], batch),
        "lru_slots": table(np.int16, (requests, hot)),
    }
    if num_real_reqs is not None:
        arrays["num_real_reqs"] = vector(np.int32, 1 + int(rng.integers(3)))
        arrays["num_real_reqs"].view[0] = num_real_reqs
    if plan:
        arrays["miss_src"] = table(np.int64, (batch, num_top_k))
        arrays["miss_dst"] = Guarded.random(rng, np.int32, arrays["miss_src"].shape, arrays["miss_src"].strides[0])
        arrays["miss_count"] = vector(np.int32, batch)
    sizes = {"item_size_bytes": item, "num_top_k": num_top_k, "hot_buffer_size": hot, "page_size": page_size}
    case = SwapInCase(arrays, sizes)

    scattered = rng.permutation(len(case["device_buffer"]))[: real * (hot + 1)].reshape(real, hot + 1)
    for b, row in enumerate(rows):
        case["top_k_tokens"][b, :num_top_k] = -1
        case["top_k_tokens"][b, : len(row.top_k)] = row.top_k
        if b < real:
            case["req_pool_indices"][b], case["seq_lens"][b] = rids[b], row.seq_len
            case["device_buffer_locs"][rids[b], : hot + 1] = scattered[b]
            _fill_request(rng, case, row, rids[b], max_tokens, stale_host_locs)
    return case


def _fill_request(rng, case: SwapInCase, row: Row, rid: int, max_tokens: int, stale_host_locs: bool) -> None:
    hot, asked = case.sizes["hot_buffer_size"], np.asarray(row.top_k, np.int64)
    host_locs, device_locs = case["host_cache_locs"][rid], case["device_buffer_locs"][rid]
    host_rows = len(case["host_cache"])
    host_locs[:max_tokens] = rng.permutation(max(host_rows, max_tokens))[:max_tokens] % host_rows

    slot_tokens = case["device_buffer_tokens"][rid]
    if row.resident is None:
        slot_tokens[:hot] = np.arange(hot)
    elif isinstance(row.resident, Mapping):
        slot_tokens[:hot] = -1
        for slot, token in row.resident.items():
            slot_tokens[slot] = token
    else:
        slot_tokens[:hot] = row.resident
    # The slots past the LRU's look like hits.
    slot_tokens[hot:] = rng.choice(asked if len(asked) else [0], len(slot_tokens) - hot)
    case["lru_slots"][rid, :hot] = rng.permutation(hot) if row.lru is None else row.lru

    held = slot_tokens[:hot] if row.seq_len > hot else np.arange(max(row.seq_len, 0))
    slots = np.flatnonzero((held >= 0) & (held < max_tokens))
    case["device_buffer"][device_locs[slots]] = case["host_cache"][host_locs[held[slots]]]
    if 0 < row.seq_len <= max_tokens:
        place = hot if row.seq_len > hot else row.seq_len - 1
        case["device_buffer"][device_locs[place]] = case["host_cache"][host_locs[row.seq_len - 1]]

    if not stale_host_locs:
        return
    needless = np.ones(max_tokens, bool)
    for tokens in (asked, held):
        needless[tokens[(tokens >= 0) & (tokens < max_tokens)]] = False
    needless = np.flatnonzero(needless)
    host_locs[needless] = rng.choice([-1, -(2**40), 2**40, host_rows], len(needless))


def random_entries(
    rng: np.random.Generator,
    slot_tokens: np.ndarray,
    seq_len: int,
    num_top_k: int,
    hit_rate: float,
    noise: float = 0.1,
) -> np.ndarray:
    """Entries of a row: hits and misses at about the given rate and, in a share of `noise` of the places, the newest
    token, tokens that stand in the row already, -1, and positions outside the sequence."""
    resident = slot_tokens[(slot_tokens >= 0) & (slot_tokens < seq_len - 1)]
    absent = np.setdiff1d(np.arange(max(seq_len - 1, 0)), resident, assume_unique=False)
    hits = min(rng.binomial(num_top_k, hit_rate), len(resident))
    chosen = np.concatenate(
        [
            rng.choice(resident, hits, replace=False),
            rng.choice(absent, min(num_top_k - hits, len(absent)), replace=False),
        ]
    )
    entries = np.full(num_top_k, -1, np.int64)
    entries[: len(chosen)] = rng.permutation(chosen)
    entries = rng.permutation(entries) if rng.random() < 0.5 else entries
    for i in np.flatnonzero(rng.random(num_top_k) < noise):
        others = (seq_len - 1, entries[rng.integers(num_top_k)], -1, seq_len + rng.integers(3), -rng.integers(2**31))
        entries[i] = others[rng.integers(len(others))]
    return entries.astype(np.int32)


def random_row(
    rng: np.random.Generator,
    seq_len: int,
    num_top_k: int,
    hot_buffer_size: int,
    hit_rate: float = 0.8,
    noise: float = 0.1,
) -> Row:
    slot_tokens = np.full(hot_buffer_size, -1, np.int64)
    if seq_len <= hot_buffer_size:
        entries = rng.integers(-2, max(seq_len, 0) + 3, num_top_k)
        garbage = rng.integers(-(2**31), 2**31, hot_buffer_size)
        return Row(seq_len, entries, np.arange(hot_buffer_size) if rng.random() < 0.5 else garbage)
    # The newest token may have been left in a slot, and so may tokens of a longer sequence that had this place before.
    held = rng.permutation(seq_len + 2)[: int(rng.integers(hot_buffer_size * 3 // 4, hot_buffer_size + 1))]
    slot_tokens[rng.permutation(hot_buffer_size)[: len(held)]] = held
    return Row(seq_len, random_entries(rng, slot_tokens, seq_len, num_top_k, hit_rate, noise), slot_tokens)


def run(place, case: SwapInCase, prepare=None, **options) -> SwapInCase:
    arrays = call(place, hisparse.load_cache_to_device_buffer_mla, case.arrays, prepare, **case.sizes, **options)
    return replace(case, arrays=arrays)


def expect(case: SwapInCase, **options) -> SwapInCase:
    expected = case.copy()
    reference.load_cache_to_device_buffer_mla(**expected.views(), **expected.sizes, **options)
    return expected


def without_stale_plan(case: SwapInCase, before: SwapInCase) -> SwapInCase:
    """The case with zeros where the plan is unspecified: in real rows, from the count on."""
    if "miss_count" not in case.arrays:
        return case
    case = case.copy()
    batch, num_top_k = len(case["miss_count"]), case.sizes["num_top_k"]
    for b in range(reference.real_rows(batch, before.views().get("num_real_reqs"))):
        for name in ("miss_src", "miss_dst"):
            case[name][b, max(case.misses(b), 0) : num_top_k] = 0
    return case


def check(place, case: SwapInCase, prepare=None, **options) -> SwapInCase:
    """Runs the op and compares every byte with the reference, then looks at the invariants. Returns the state after."""
    actual = run(place, case, prepare, **options)
    expected = expect(case, **options)
    assert_same(without_stale_plan(actual, case).arrays, without_stale_plan(expected, case).arrays)
    check_swap_in_invariants(case.arrays, actual.arrays, case.sizes, options.get("skip_io", False))
    return actual
