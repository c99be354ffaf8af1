"""Calls of the swap-in's relatives: the plain op's with pools of DeepSeek-V4 pages, or with blocks, keys and values.

What they must do is worked out by the plain op's reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import reference
from places import Guarded, assert_same, call
from swap_in_cases import Row, SwapInCase, expect, make_case, without_stale_plan

import hisparse

PAGE_TOKENS, PAGE_BYTES, VALUE_BYTES, SCALE_BYTES, SCALES_AT = 64, 37_440, 576, 8, 36_864
ITEM_BYTES = VALUE_BYTES + SCALE_BYTES


def token_places(loc: int) -> tuple[slice, slice]:
    """The bytes of a token's value and of its scale in a pool of pages."""
    page, place = divmod(int(loc), PAGE_TOKENS)
    value, scale = page * PAGE_BYTES + place * VALUE_BYTES, page * PAGE_BYTES + SCALES_AT + place * SCALE_BYTES
    return slice(value, value + VALUE_BYTES), slice(scale, scale + SCALE_BYTES)


def get_token(pool: np.ndarray, loc: int) -> np.ndarray:
    return np.concatenate([reference.pool_bytes(pool)[place] for place in token_places(loc)])


def put_token(pool: np.ndarray, loc: int, item: np.ndarray) -> None:
    value, scale = token_places(loc)
    flat = reference.pool_bytes(pool)
    flat[value], flat[scale] = item[:VALUE_BYTES], item[VALUE_BYTES:]


def random_pages(rng, tokens: int, lead: int = 0) -> Guarded:
    return Guarded.random(rng, np.uint8, (-(-tokens // PAGE_TOKENS), PAGE_BYTES), lead=lead)


def paged(rng, items: np.ndarray, lead: int = 0) -> Guarded:
    """The items, [rows, 584], in pages; the rest of these is random."""
    pages = random_pages(rng, len(items), lead)
    for loc, item in enumerate(items):
        put_token(pages.view, loc, item)
    return pages


def copy_planned(
    miss_src,
    miss_dst,
    miss_count,
    num_real_reqs,
    host_cache,
    device_buffer,
    item_size_bytes,
    num_blocks=4,
    block_size=1024,
    is_dsv4_layout=False,
    skip_io=False,
) -> None:
    """copy_cache_planned_mla, from its contract. Where two items have one target, the later one wins here."""
    del num_blocks, block_size  # neither changes the result
    width = min(miss_src.shape[1], miss_dst.shape[1])
    for b in range(0 if skip_io else reference.real_rows(len(miss_src), num_real_reqs)):
        for i in range(min(max(int(miss_count[b]), 0), width)):
            src, dst = int(miss_src[b, i]), int(miss_dst[b, i])
            rows = [
                pool.nbytes // PAGE_BYTES * PAGE_TOKENS if is_dsv4_layout else pool.nbytes // item_size_bytes
                for pool in (host_cache, device_buffer)
            ]
            if not (0 <= src < rows[0] and 0 <= dst < rows[1]):
                continue
            if is_dsv4_layout:
                put_token(device_buffer, dst, get_token(host_cache, src))
            else:
                items = [reference.item_rows(pool, item_size_bytes) for pool in (host_cache, device_buffer)]
                items[1][dst] = items[0][src]


@dataclass
class Dsv4Case:
    """`plain` is the call with items in rows; `arrays` and `sizes` are those of the call with pages."""

    plain: SwapInCase
    arrays: dict[str, Guarded]

    @property
    def sizes(self) -> dict[str, int]:
        return self.plain.sizes

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name].view


def dsv4_case(rng, rows: Sequence[Row], leads: tuple[int, int] = (0, 0), **others) -> Dsv4Case:
    plain = make_case(rng, rows, item_size_bytes=ITEM_BYTES, **others)
    pools = {
        name: paged(rng, plain[name], lead) for name, lead in zip(("host_cache", "device_buffer"), leads, strict=True)
    }
    return Dsv4Case(plain, plain.arrays | pools)


def expect_dsv4(case: Dsv4Case, **options) -> Dsv4Case:
    plain = expect(case.plain, **options)
    pages = case.arrays["device_buffer"].copy()
    for loc, item in enumerate(plain["device_buffer"]):
        put_token(pages.view, loc, item)
    return Dsv4Case(plain, plain.arrays | {"host_cache": case.arrays["host_cache"], "device_buffer": pages})


def check_dsv4(place, case: Dsv4Case, prepare=None, **options) -> Dsv4Case:
    """Runs the op and compares every byte, those between the tokens included."""
    function = hisparse.load_cache_to_device_buffer_dsv4_mla
    actual = call(place, function, case.arrays, prepare, **case.sizes, **options)
    expected = expect_dsv4(case, **options)
    got, wanted = (
        without_stale_plan(SwapInCase(arrays, case.sizes), case.plain) for arrays in (actual, expected.arrays)
    )
    assert_same(got.arrays, wanted.arrays)
    return Dsv4Case(expected.plain, actual)


@dataclass
class BlockCase:
    """`plain` is the call with single tokens, whose items are a key and a value side by side."""

    plain: SwapInCase
    arrays: dict[str, Guarded]
    sizes: dict[str, int]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name].view


def tokens_of(blocks: Sequence[int], sparse_block_size: int) -> list[int]:
    """The entries that blocks stand for, -1 where there is no such token in 31 bits."""
    entries = [-1 if block < 0 else block * sparse_block_size + i for block in blocks for i in range(sparse_block_size)]
    return [token if token < 2**31 else -1 for token in entries]


def block_case(
    rng,
    rows: Sequence[tuple[int, Sequence[int], object]],
    sparse_block_size: int,
    hot_buffer_size: int,
    item_size_bytes: int = 20,
    leads: Sequence[int] = (0, 0, 0, 0),
    **others,
) -> BlockCase:
    """Rows are (seq_len, blocks, what is resident). All have as many blocks as the longest; -1 fills up."""
    width = max(len(blocks) for _, blocks, _ in rows)
    all_blocks = [[*blocks, *[-1] * (width - len(blocks))] for _, blocks, _ in rows]
    plain = make_case(
        rng,
        [
            Row(seq_len, tokens_of(blocks, sparse_block_size), resident)
            for (seq_len, _, resident), blocks in zip(rows, all_blocks, strict=True)
        ],
        num_top_k=width * sparse_block_size,
        hot_buffer_size=hot_buffer_size,
        item_size_bytes=2 * item_size_bytes,
        plan=False,
        **others,
    )
    arrays = {name: array for name, array in plain.arrays.items() if name not in ("host_cache", "device_buffer")}
    del arrays["top_k_tokens"]
    arrays["top_k_blocks"] = Guarded.of(rng, all_blocks, np.int32, lead=4, gap=int(rng.integers(3)))
    pools = ("host_cache_k", "host_cache_v", "device_buffer_k", "device_buffer_v")
    for name, lead in zip(pools, leads, strict=True):
        half = _half(plain[name[:-2]], name, item_size_bytes)
        arrays[name] = Guarded.of(rng, half, lead=lead)
    sizes = {
        "item_size_bytes": item_size_bytes,
        "hot_buffer_size": hot_buffer_size,
        "sparse_block_size": sparse_block_size,
        "page_size": plain.sizes["page_size"],
    }
    return BlockCase(plain, arrays, sizes)


def _half(items: np.ndarray, name: str, item_size_bytes: int) -> np.ndarray:
    return items[:, :item_size_bytes] if name.endswith("_k") else items[:, item_size_bytes:]


def expect_blocks(case: BlockCase, **options) -> BlockCase:
    plain = expect(case.plain, **options)
    wanted = {name: plain.arrays.get(name, array).copy() for name, array in case.arrays.items()}
    for name in ("device_buffer_k", "device_buffer_v"):
        wanted[name] = case.arrays[name].copy()
        wanted[name].view[:] = _half(plain["device_buffer"], name, case.sizes["item_size_bytes"])
    return BlockCase(plain, wanted, case.sizes)


def check_blocks(place, case: BlockCase, prepare=None, **options) -> BlockCase:
    actual = call(place, hisparse.load_blocks_to_device_buffer_mha, case.arrays, prepare, **case.sizes, **options)
    expected = expect_blocks(case, **options)
    assert_same(actual, expected.arrays)
    return BlockCase(expected.plain, actual, case.sizes)


def random_blocks(rng, seq_len: int, width: int, sparse_block_size: int, noise: float = 0.1) -> list[int]:
    """Different blocks of the sequence and, in a share of `noise`, -1, blocks past the end and repeated ones."""
    there = -(-max(seq_len, 1) // sparse_block_size)
    blocks = rng.permutation(there)[:width].tolist()
    blocks += [-1] * (width - len(blocks))
    for i in np.flatnonzero(rng.random(width) < noise):
        others = (-1, -(2**31), there, there + 5, 2**31 - 1, blocks[int(rng.integers(width))])
        blocks[i] = others[int(rng.integers(len(others)))]
    return blocks


def random_block_row(rng, seq_len: int, width: int, sparse_block_size: int, hot: int, noise: float = 0.1):
    resident = np.full(hot, -1, np.int64)
    held = rng.permutation(max(seq_len, 0) + 2)[: int(rng.integers(hot // 2, hot + 1))]
    resident[rng.permutation(hot)[: len(held)]] = held
    return seq_len, random_blocks(rng, seq_len, width, sparse_block_size, noise), resident
