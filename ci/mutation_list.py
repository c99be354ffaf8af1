"""Small mistakes that somebody could make in the kernels and in what launches them, for ci/mutations.py to make.

`before` stands exactly once in its file (a test checks), and `after` takes its place. Barriers are found by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMON = "kernels/common/"
SWAP_IN, WAVE, CHUNK, TILE, PART = (
    COMMON + name for name in ("swap_in.cuh", "copy_wave.cuh", "copy_chunk.cuh", "copy_tile.cuh", "copy_part.cuh")
)
TRANSFER, LAYOUTS, ITEM_LAYOUTS = (COMMON + name for name in ("transfer.cuh", "layouts.h", "item_layouts.h"))
INDEX, PLANNED = (COMMON + name for name in ("index_vector.cuh", "copy_planned.cuh"))
CONTENT, LAUNCHER = COMMON + "content_check.cuh", "kernels/host/launcher.cpp"
END = "kernels/host/released_gil.cpp"
HIP, CUDA = "kernels/hip/primitives.h", "kernels/cuda/primitives.cuh"

# What has to notice: test files, the likeliest first, or an architecture whose code breaks a rule of the ISA gate.
FUZZING = ("test_fuzz.py",)
LAYOUT_TESTS = next(path.name for path in (ROOT / "tests").glob("test_*layouts.py"))
SWAP_IN_TESTS = (*FUZZING, "test_swap_in.py", "test_swap_in_sizes.py", "test_field_cases.py")
SAFETY_TESTS = ("test_swap_in_safety.py", *FUZZING)
COPY_TESTS = (*FUZZING, "test_copy_items.py")
TRANSFER_TESTS = (*FUZZING, "test_kvcacheio.py", LAYOUT_TESTS)
LARGE_POOL_TESTS = ("test_field_cases.py", "test_kvcacheio_field_cases.py", LAYOUT_TESTS)
PLANNED_TESTS = (*FUZZING, "test_planned_copy.py", "test_dsv4_transfer.py")
CONTENT_TESTS = ("test_content_check.py",)
TESTS_OF_BARRIERS = {
    "content_check.cuh": CONTENT_TESTS,
    "copy_layers.cuh": PLANNED_TESTS,
    "copy_planned.cuh": PLANNED_TESTS,
    "copy_share.cuh": PLANNED_TESTS,
    "transfer.cuh": TRANSFER_TESTS,
}
END_TESTS = ("test_interpreter_end.py",)
ERROR_TESTS = ("test_errors.py", "test_kvcacheio_errors.py", "test_bad_input.py")


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...] = SWAP_IN_TESTS
    arch: str = ""  # caught by the ISA gate: the architecture to build for
    rule: str = ""  # and the rule that it breaks
    quick: bool = False  # one of the few that ci/test.sh makes
    occurrence: int = 0  # of `before`, where it stands several times

    def apply(self, text: str) -> str:
        parts = text.split(self.before)
        at = self.occurrence + 1
        return self.before.join(parts[:at]) + self.after + self.before.join(parts[at:])


BY_HAND = [
    # The check of contents.
    Mutation("check of contents: a slot past the last", CONTENT, "lru[i] >= slots)", "lru[i] > slots)", CONTENT_TESTS),
    Mutation(
        "check of contents: no look at slot H", CONTENT, "!is_short ? slots + 1", "!is_short ? slots", CONTENT_TESTS
    ),
    Mutation(
        "check of contents: values past the first bitmap", CONTENT, "first += bits)", "first += limit)", CONTENT_TESTS
    ),
    Mutation("check of contents: rows halved", CONTENT, "<< 32 | static_cast", "<< 31 | static_cast", CONTENT_TESTS),
    Mutation("check of contents: not asked for", LAUNCHER, "if (checks_contents())\n", "if (false)\n", CONTENT_TESTS),
    # What the swap-in makes of a row.
    Mutation(
        "short sequence: one token too few",
        SWAP_IN,
        "if (seq_len <= p_.hot_buffer_size)",
        "if (seq_len < p_.hot_buffer_size)",
    ),
    Mutation(
        "short sequence: no check for -1", SWAP_IN, "token >= 0 && token < seq_len ?", "token < seq_len ?", SAFETY_TESTS
    ),
    Mutation("short sequence: no miss count", SWAP_IN, "p_.miss_count[row_] = 0;", ";"),
    Mutation("padding keeps its output", SWAP_IN, "if (block_part() == 0) write_padding();", ""),
    Mutation("index of 64 bits: high half ignored", INDEX, "vector.is_int64 ? low_half[1] : low >> 31", "low >> 31"),
    Mutation(
        "index of 32 bits: sign lost",
        INDEX,
        "vector.is_int64 ? low_half[1] : low >> 31",
        "vector.is_int64 ? low_half[1] : 0",
    ),
    Mutation(
        "LRU: filled slots stay in front",
        SWAP_IN,
        "int rotated = free_before - all_misses;",
        "int rotated = free_before;",
        quick=True,
    ),
    Mutation(
        "LRU: hit slots in front",
        SWAP_IN,
        "hit_position = all_free + recent.first - free_before",
        "hit_position = recent.first - free_before",
    ),
    Mutation(
        "LRU: last slot not written",
        SWAP_IN,
        "i + j < recent.end) row[position]",
        "i + j < recent.end - 1) row[position]",
    ),
    Mutation(
        "slot of a broken LRU row not bounded",
        COMMON + "recent_slots.cuh",
        "min_of_halves(both, no_slot | no_slot << 16)",
        "both",
        SAFETY_TESTS,
    ),
    Mutation(
        "host loc past the pool read", SWAP_IN, "from >= 0 && from < p_.host_cache.rows", "from >= 0", SAFETY_TESTS
    ),
    Mutation(
        "host loc before the pool read",
        SWAP_IN,
        "return host_loc >= 0 && device_loc < p.device_buffer.rows;",
        "return device_loc < p.device_buffer.rows;",
        SAFETY_TESTS,
    ),
    Mutation(
        "device loc past the pool written",
        SWAP_IN,
        "host_loc >= 0 && device_loc < p.device_buffer.rows",
        "host_loc >= 0",
        SAFETY_TESTS,
    ),
    Mutation(
        "item offset of 32 bits",
        ITEM_LAYOUTS,
        "static_cast<uint64_t>(loc) * item_bytes",
        "static_cast<uint32_t>(loc) * item_bytes",
        LARGE_POOL_TESTS,
    ),
    Mutation("skip_io copies", SWAP_IN, "all_misses > 0 && !p_.skip_io", "all_misses > 0"),
    Mutation(
        "several blocks: arrivals left over", SWAP_IN, "if (shares_request && thread_ == 0) p_.arrivals[row_] = 0;", ""
    ),
    Mutation(
        "several blocks: first one writes the tables", SWAP_IN, "static_cast<uint32_t>(p_.blocks_per_request - 1)", "0u"
    ),
    Mutation(
        "scan: own warp counted",
        COMMON + "block_scan.cuh",
        "lane < warp ? warp_total",
        "lane <= warp ? warp_total",
        quick=True,
    ),
    Mutation(
        "scan: inclusive", COMMON + "block_scan.cuh", "warps_before + inclusive - value", "warps_before + inclusive"
    ),
    Mutation("scan: totals by lane 31", COMMON + "block_scan.cuh", "lane == kWarpSize - 1", "lane == 31"),
    Mutation(
        "four at once past the row",
        "kernels/host/launcher.cpp",
        "params.hot_buffer_size % 4 == 0 &&",
        "",
    ),
    # How items are copied.
    Mutation(
        "wave: gate removed",
        WAVE,
        "item_bytes - item_bytes % (Variant::kIsGated ? kRound : 16)",
        "item_bytes & ~15",
        COPY_TESTS,
        quick=True,
    ),
    Mutation("wave: a round of 32 lanes", WAVE, "kRound = kWarpSize * 16", "kRound = 32 * 16", COPY_TESTS),
    Mutation(
        "wave: alignment of the source alone",
        WAVE,
        "reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst)",
        "reinterpret_cast<uintptr_t>(src)",
        COPY_TESTS,
    ),
    Mutation(
        "wave: a byte too many",
        WAVE,
        "words_end_ + lane_ < item.bytes)\n      store_byte",
        "words_end_ + lane_ <= item.bytes)\n      store_byte",
        COPY_TESTS,
    ),
    Mutation(
        "wave: seven bytes at the end left out",
        WAVE,
        "words_end_ + lane_ < item.bytes)\n      store_byte",
        "words_end_ + lane_ < 0)\n      store_byte",
        COPY_TESTS,
    ),
    Mutation(
        "wave: second word of a step left out",
        WAVE,
        "item.wide_end + at + step * kNarrowStep",
        "item.wide_end + at",
        COPY_TESTS,
    ),
    Mutation(
        "chunk: a word too many",
        CHUNK,
        "if (word_ >= shape_.words_per_item)",
        "if (word_ > shape_.words_per_item)",
        COPY_TESTS,
    ),
    Mutation(
        "chunk: an item too many",
        CHUNK,
        "&& item_ < count_ && items_.locate",
        "&& item_ <= count_ && items_.locate",
        COPY_TESTS,
    ),
    Mutation(
        "chunk: the second tail of a thread left out",
        CHUNK,
        "tail_item_ += workers_;",
        "tail_item_ += 2 * workers_;",
        (*FUZZING, "test_swap_in_dsv4.py"),
    ),
    Mutation("tile: misaligned words", TILE, "if (!warp_any(bits & 15))", "if (!warp_any(bits & 7))", TRANSFER_TESTS),
    Mutation(
        "tile: a part too few",
        TILE,
        "is_inside = place.part < count_;",
        "is_inside = place.part < count_ - 1;",
        TRANSFER_TESTS,
    ),
    Mutation(
        "copy_items: no check for -1",
        COMMON + "copy_items.cuh",
        "src < 0 || src >= p.src.rows",
        "src >= p.src.rows",
        COPY_TESTS,
    ),
    # How transfers find their bytes.
    Mutation(
        "transfer: no check for -1",
        TRANSFER,
        "src_token_ >= 0 && src_token_ < p_.src.tokens",
        "src_token_ < p_.src.tokens",
        TRANSFER_TESTS,
    ),
    Mutation("transfer: past the end of a pool", TRANSFER, "dst_token_ < p_.dst.tokens", "true", TRANSFER_TESTS),
    Mutation(
        "transfer: values from the keys",
        TRANSFER,
        ": end.pools[is_value];",
        ": end.pools[0];",
        TRANSFER_TESTS,
    ),
    Mutation(
        "part: its last words too early",
        PART,
        "words[i], i * kStep < left_);",
        "words[i], i * kStep < left_ - kBytes);",
        TRANSFER_TESTS,
    ),
    Mutation(
        "part: its last round left out", PART, "while (left_ > kRound)", "while (left_ > 2 * kRound)", TRANSFER_TESTS
    ),
    Mutation("part: words of 2 bytes", PART, "if (word_bytes_ == 2) word_bytes_ = 1;", "", TRANSFER_TESTS),
    Mutation("transfer: the first plane for all", TRANSFER, "if (plane_ != plane) find_plane();", "", TRANSFER_TESTS),
    Mutation("transfer: a plane left out", TRANSFER, "++plane_;", "plane_ += 2;", TRANSFER_TESTS),
    Mutation(
        "layout: stride of a page is that of a token",
        LAYOUTS,
        "int64_t{number / size} * page_stride",
        "int64_t{number / size} * token_stride",
        TRANSFER_TESTS,
    ),
    Mutation(
        "layout: heads of a page too close",
        LAYOUTS,
        "item / head_num, page_size * token}",
        "item / head_num, token}",
        TRANSFER_TESTS,
    ),
    Mutation(
        "layout: offset of 32 bits",
        LAYOUTS,
        "return token * page_stride;",
        "return static_cast<int32_t>(token * page_stride);",
        LARGE_POOL_TESTS,
    ),
    # The swap-in's relatives.
    Mutation(
        "pages: scales as far apart as values", ITEM_LAYOUTS, "place * kScaleBytes", "place * kValueBytes", FUZZING
    ),
    Mutation("pages: scale taken for a part of the value", ITEM_LAYOUTS, "at < kTailAt", "at <= kTailAt", FUZZING),
    Mutation(
        "planned copy: padding copied",
        PLANNED,
        "if (first + i < real_rows) of_group += of_row;",
        "of_group += of_row;",
        PLANNED_TESTS,
    ),
    Mutation(
        "planned copy: next row's place",
        PLANNED,
        "if (later > item) continue;",
        "if (later >= item) continue;",
        PLANNED_TESTS,
    ),
    Mutation(
        "planned copy: padding of few rows",
        PLANNED,
        "row < real_rows && place < of_row",
        "place < of_row",
        PLANNED_TESTS,
    ),
    Mutation(
        "planned copy: a place past the last warp",
        PLANNED,
        "if (place >= share_.warps()) place -= share_.warps();",
        "",
        PLANNED_TESTS,
    ),
    Mutation(
        "planned copy: a list with gaps", PLANNED, "locs_[vote.before] = found;", "locs_[lane] = found;", PLANNED_TESTS
    ),
    Mutation(
        "planned copy: fewer lanes than entries",
        "kernels/host/copy_launcher.cpp",
        "params.log2_lanes_per_row < entries)",
        "params.log2_lanes_per_row < entries / 2)",
        PLANNED_TESTS,
    ),
    Mutation(
        "planned copy: count past the plan",
        PLANNED,
        "count < p_.plan_width ? count : p_.plan_width",
        "count",
        PLANNED_TESTS,
    ),
    Mutation("planned copy: no check for -1", PLANNED, "locs.dst >= 0 &&", "true &&", PLANNED_TESTS),
    Mutation(
        "translation: past the mapping",
        COMMON + "translate.cuh",
        "location < p.mapping_size ?",
        "true ?",
        ("test_translate.py",),
    ),
    # What the host decides.
    Mutation(
        "word size by the item alone",
        "kernels/host/launcher.cpp",
        "together % candidate == 0",
        "item_size_bytes % candidate == 0",
        COPY_TESTS,
    ),
    Mutation(
        "aligned rows by the address alone",
        "kernels/host/launcher.cpp",
        "% (count * sizeof(T)) == 0 && stride % count == 0",
        "% (count * sizeof(T)) == 0",
        SWAP_IN_TESTS,
    ),
    Mutation(
        "runs by the source alone",
        "kernels/host/kvcacheio_launcher.cpp",
        "src[i] == src[i - 1] + 1 && dst[i] == dst[i - 1] + 1",
        "src[i] == src[i - 1] + 1",
        ("test_kvcacheio_direct.py",),
    ),
    Mutation(
        "K == H refused",
        "kernels/host/checks.cpp",
        "if (hot_buffer_size < num_top_k)",
        "if (hot_buffer_size <= num_top_k)",
    ),
    Mutation(
        "seq_lens of 16 bits accepted",
        "kernels/host/checks.cpp",
        "check.vector(seq_lens, 32, 64,",
        "check.vector(seq_lens, 16, 64,",
        ERROR_TESTS,
    ),
    Mutation(
        "row strides that differ accepted",
        "kernels/host/checks.cpp",
        "  Checker::equal_row_strides(device_buffer_locs, device_buffer_tokens);",
        "",
        ERROR_TESTS,
    ),
    Mutation(
        "read-only arrays accepted",
        "kernels/host/checker.cpp",
        "access == Access::kWrite && tensor.read_only()",
        "false && tensor.read_only()",
        ERROR_TESTS,
    ),
    Mutation(
        "a page's bytes overflow",
        "kernels/host/kvcacheio_checks.cpp",
        "if (__builtin_mul_overflow(sizes.page_size, sizes.layout_dim, &row))",
        "if (row = static_cast<int64_t>(static_cast<uint64_t>(sizes.page_size) * sizes.layout_dim); false)",
        ("test_security.py",),
    ),
    # The end of the process.
    Mutation("the end waits for no call", END, "while (under_way > 0 &&", "while (false &&", END_TESTS),
    Mutation(
        "calls are counted after their checks",
        "kernels/host/binding.cpp",
        """    const UnderWay under_way;
    PyObject* const all[] = {arguments.ptr()...};
    try {
      auto call = check(all);
""",
        """    PyObject* const all[] = {arguments.ptr()...};
    try {
      auto call = check(all);
      const UnderWay under_way;
""",
        END_TESTS,
    ),
    Mutation("a fork's child forgets its own call", END, "under_way = depth;", "under_way = 0;", END_TESTS),
    # What the compiler makes of it.
    Mutation(
        "AMD: hint of the load removed",
        HIP,
        "__builtin_nontemporal_load(as_global<const Vector>(address))",
        "*as_global<const Vector>(address)",
        arch="gfx950",
        rule="wide-loads",
    ),
    Mutation(
        "AMD: non-temporal store",
        HIP,
        "*as_global<Vector>(address) = word.value;",
        "__builtin_nontemporal_store(word.value, as_global<Vector>(address));",
        arch="gfx950",
        rule="store-marks",
    ),
    Mutation("AMD: one item in flight", WAVE, "kItems = 4;", "kItems = 1;", arch="gfx942", rule="loads-in-flight"),
    Mutation(
        "AMD: pointers of unknown kind",
        HIP,
        "return *(GlobalPointer<const T>)(reinterpret_cast<uintptr_t>(address));",
        "return *address;",
        arch="gfx942",
        rule="flat-access",
    ),
    Mutation(
        "NVIDIA: hint of the load removed",
        CUDA,
        '"ld.global.L1::evict_first"',
        '"ld.global"',
        arch="sm_90",
        rule="wide-loads",
    ),
    Mutation(
        "NVIDIA: streaming store",
        CUDA,
        '"st.global.cg.v2.b64 [',
        '"st.global.cs.v2.b64 [',
        arch="sm_90",
        rule="wide-stores",
    ),
    Mutation(
        "NVIDIA: one word in flight",
        CHUNK,
        "kInFlight = 5;",
        "kInFlight = 1;",
        arch="sm_90",
        rule="loads-in-flight",
    ),
]


def dropped_barriers() -> Iterator[Mutation]:
    """Each barrier of the shared kernels, left out."""
    for path in sorted((ROOT / COMMON).glob("*.cuh")):
        text = path.read_text()
        for kind in ("block_barrier", "warp_barrier"):
            for n, place in enumerate(re.finditer(rf"\b{kind}\(\);", text)):
                line = text.count("\n", 0, place.start()) + 1
                yield Mutation(
                    f"{path.name}:{line}: no {kind}",
                    COMMON + path.name,
                    f"{kind}();",
                    ";",
                    TESTS_OF_BARRIERS.get(path.name, SWAP_IN_TESTS),
                    quick=path.name == "swap_in.cuh" and n == 1,
                    occurrence=n,
                )


def mutations() -> list[Mutation]:
    return [*BY_HAND, *dropped_barriers()]
