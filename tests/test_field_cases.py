"""Inputs that broke libraries of this kind in real use, each kept with its right outcome."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import reference
from places import Guarded, assert_same, call, make_place, torch
from swap_in_cases import Row, SwapInCase, check, expect, make_case, random_row, run, without_stale_plan

import hisparse

MAP_NORESERVE = 0x4000  # of mmap on Linux: address space alone, so that pools of many GiB cost what is touched of them


def half_resident_row(rng, num_top_k=2048, hot=4096, seq_len=6000):
    asked = rng.permutation(seq_len - 1)[:num_top_k]
    others = np.setdiff1d(np.arange(seq_len - 1), asked)
    resident = np.concatenate([asked[: num_top_k // 2], rng.permutation(others)[: hot - num_top_k // 2]])
    return Row(seq_len, rng.permutation(asked), rng.permutation(resident))


def test_F01_sixteen_waves_in_a_block(place, rng):
    case = make_case(rng, [half_resident_row(rng)], num_top_k=2048, hot_buffer_size=4096, item_size_bytes=64)
    assert check(place, case, block_size=1024).misses(0) == 1024


def test_F03_hits_in_the_upper_half_of_a_wave64_alone(rng):
    upper = np.flatnonzero(np.arange(96) % 64 >= 32)
    entries = 200 + np.arange(96)
    row = Row(400, entries, {int(i): int(entries[i]) for i in upper})
    case = make_case(rng, [row], num_top_k=96, hot_buffer_size=128)
    results = [check(make_place(f"cpu{width}-{copy}-numpy"), case) for width in (32, 64) for copy in ("wave", "chunk")]
    for result in results:
        assert_same(without_stale_plan(result, case).arrays, without_stale_plan(results[0], case).arrays)
    assert results[0].misses(0) == 96 - len(upper)


def test_F04_the_whole_output_is_defined(place, rng):
    rows = [Row(3, [0, 1, 2]), Row(40, [0, 5, 10, 15, 20, 25, 30, 35]), Row(0, []), Row(0, [])]
    case = make_case(rng, rows, num_top_k=8, hot_buffer_size=16, num_real_reqs=2)
    case["seq_lens"][2:] = 0
    case["top_k_device_locs"][:, :8] = 123_456
    after = check(place, case)
    assert after.slots(0) == [0, 1, 2, -1, -1, -1, -1, -1]
    assert min(after.slots(1)) >= 0
    assert (after["top_k_device_locs"][2:, :8] == -1).all()


def test_F06_a_repeated_miss(place, rng):
    after = check(place, make_case(rng, [Row(20, [5, 5, 9, 11], {})], num_top_k=4, hot_buffer_size=8))
    assert after.slots(0)[0] == after.slots(0)[1] and after.misses(0) == 3
    held = after.tokens(0)[after.tokens(0) >= 0]
    assert sorted(held.tolist()) == [5, 9, 11]


def test_F06_a_repeated_hit(place, rng):
    after = check(place, make_case(rng, [Row(20, [5, 5, 9, 11], {6: 5})], num_top_k=4, hot_buffer_size=8))
    assert after.slots(0)[:2] == [6, 6] and after.misses(0) == 2


def test_F07_a_repeated_newest_token(place, rng):
    after = check(place, make_case(rng, [Row(20, [19, 19, 2, 3], {})], num_top_k=4, hot_buffer_size=8))
    assert after.slots(0)[:2] == [8, 8] and after.misses(0) == 2


def test_F09_valid_entries_in_the_middle_of_a_short_row(place, rng):
    after = check(place, make_case(rng, [Row(3, [-1, -1, -1, 0, 1, 2, -1, -1])], num_top_k=8, hot_buffer_size=16))
    assert after.slots(0) == [-1, -1, -1, 0, 1, 2, -1, -1]


def refused(place, case: SwapInCase, error, match: str, prepare=None, **options):
    """The call raises, and nothing is changed."""
    kept = {}

    def remember(views):
        kept.update(views)
        return prepare(dict(views)) if prepare is not None else views

    with pytest.raises(error, match=match):
        run(place, case, remember, **options)
    for name, view in kept.items():
        after = view if place.library == "numpy" else view.cpu().numpy()
        assert np.array_equal(after, case[name]), name


def test_F10_a_buffer_smaller_than_top_k(place, rng):
    case = make_case(rng, [Row(64, range(8))], num_top_k=8, hot_buffer_size=8)
    case.sizes["hot_buffer_size"] = 4
    refused(place, case, ValueError, "hot_buffer_size")


def test_F11_the_largest_buffer(sweep_place, rng):
    hot = 32_768
    row = random_row(rng, hot + 10, 64, hot, noise=0)
    row.resident[hot - 1] = 7 if 7 not in row.resident else row.resident[hot - 1]
    row.top_k[:4] = [row.resident[hot - 1], hot + 9, hot + 9, -1]
    after = check(sweep_place, make_case(rng, [row], num_top_k=64, hot_buffer_size=hot, item_size_bytes=8))
    assert after.slots(0)[1:4] == [hot, hot, -1]


def test_F11_past_the_largest_buffer(place, rng):
    case = make_case(rng, [], num_top_k=64, hot_buffer_size=32_769, item_size_bytes=8)
    refused(place, case, ValueError, r"hot_buffer_size.*32,?768")


def test_F11_int32_lru_slots(place, rng):
    case = make_case(rng, [random_row(rng, 50, 8, 16)], num_top_k=8, hot_buffer_size=16)
    case.arrays["lru_slots"] = Guarded.of(rng, case["lru_slots"], np.int32)
    refused(place, case, TypeError, "lru_slots.*int16")


@pytest.mark.parametrize("block_size", [1024, 960])
def test_F12_large_blocks(place, rng, block_size):
    case = make_case(rng, [half_resident_row(rng, 200, 300, 800)], num_top_k=200, hot_buffer_size=300)
    check(place, case, block_size=block_size)


@pytest.mark.parametrize("block_size", [1000, 2048, 0, -256])
def test_F12_blocks_that_no_device_has(place, rng, block_size):
    case = make_case(rng, [random_row(rng, 50, 8, 16)], num_top_k=8, hot_buffer_size=16)
    refused(place, case, ValueError, "block_size", block_size=block_size)
    check(place, case)


def test_F13_more_shared_memory_than_the_device_has(cpu_place, rng):
    """16,384 slots on a compute unit with 64 KiB (gfx942)."""
    with hisparse.cpu.options(shared_memory_bytes=65_536):
        case = make_case(rng, [half_resident_row(rng, 2048, 16_384, 20_000)], num_top_k=2048, hot_buffer_size=16_384)
        refused(cpu_place, case, ValueError, r"\d{2},?\d{3}.*\d{2},?\d{3}", block_size=1024)


def sparse_array(dtype, shape, row_stride=None) -> np.ndarray:
    itemsize = np.dtype(dtype).itemsize
    row_stride = shape[1] if row_stride is None else row_stride
    size = ((shape[0] - 1) * row_stride + shape[1]) * itemsize
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, MemoryError):
        pytest.skip(f"no address space for {size} bytes")
    return np.ndarray(shape, dtype, buffer=memory, strides=(row_stride * itemsize, itemsize))


@pytest.mark.skipif(sys.platform != "linux", reason="needs MAP_NORESERVE")
def test_F15_pools_above_4_gib(cpu_place, rng):
    rows, item = 5_000_000, 1056
    src, dst = sparse_array(np.uint8, (rows, item)), sparse_array(np.uint8, (rows, item))
    src_locs = np.array([rows - 1, 2**32 // item + 1, 2**31 // item + 1, 3], np.int64)
    dst_locs = np.array([5, rows - 2, 2**32 // item, 2**31 // item + 1], np.int64)
    src[src_locs] = rng.integers(1, 256, (4, item))
    with cpu_place.options():
        hisparse.copy_items(src, dst, src_locs, dst_locs, item)
    assert np.array_equal(dst[dst_locs], src[src_locs])
    aliases = (dst_locs * item) % 2**32 // item
    assert not dst[np.setdiff1d(aliases, dst_locs)].any()


@pytest.mark.skipif(sys.platform != "linux", reason="needs MAP_NORESERVE")
def test_F15_swap_in_between_pools_above_4_gib(cpu_place, rng):
    rows, item = 5_000_000, 1056
    case = make_case(rng, [Row(40, [3, 30, 12, 7], {})], num_top_k=4, hot_buffer_size=8, item_size_bytes=item)
    host_cache, device_buffer = (sparse_array(np.uint8, (rows, item)) for _ in range(2))
    rid = case["req_pool_indices"][0]
    host_locs = np.array([rows - 1, 2**32 // item + 1, 2**31 // item + 1, 3])
    case["host_cache_locs"][rid, [3, 30, 12, 7]] = host_locs
    case["device_buffer_locs"][rid, :8] = 2**32 // item + 1 + np.arange(8)
    host_cache[host_locs] = rng.integers(1, 256, (4, item))
    views = case.views() | {"host_cache": host_cache, "device_buffer": device_buffer}
    with cpu_place.options():
        hisparse.load_cache_to_device_buffer_mla(**views, **case.sizes)
    assert np.array_equal(device_buffer[case["top_k_device_locs"][0, :4]], host_cache[host_locs])
    assert not device_buffer[:9].any()


@pytest.mark.skipif(sys.platform != "linux", reason="needs MAP_NORESERVE")
def test_F15_tables_of_more_than_2_to_31_elements(cpu_place, rng):
    """The same call with its rows spread so far that products of row and stride need 64 bits."""
    rows = [half_resident_row(rng, 20, 40, 100) for _ in range(3)]
    case = make_case(rng, rows, num_top_k=20, hot_buffer_size=40, index_dtypes=(np.int32, np.int32))
    after, spread = case.copy(), {}
    requests, first_request = len(case["lru_slots"]), 2**11 + 1
    for name, view in after.views().items():
        if view.ndim == 1 or name in ("host_cache", "device_buffer"):
            spread[name] = view
        elif name in ("lru_slots", "device_buffer_tokens", "device_buffer_locs", "host_cache_locs"):
            spread[name] = sparse_array(view.dtype, (first_request + requests, view.shape[1]), 2**20)
            spread[name][first_request:] = view
        else:
            spread[name] = sparse_array(view.dtype, view.shape, 2**30)
            spread[name][:] = view
    spread["req_pool_indices"] = case["req_pool_indices"] + np.int32(first_request)
    with cpu_place.options():
        hisparse.load_cache_to_device_buffer_mla(**spread, **case.sizes)
    for name, view in after.views().items():
        if spread[name] is not view and name != "req_pool_indices":
            view[:] = spread[name][-len(view) :]
    assert_same(without_stale_plan(after, case).arrays, without_stale_plan(expect(case), case).arrays)


@pytest.mark.parametrize(
    ("item_size_bytes", "leads"), [(24, (0, 0)), (584, (0, 0)), (512, (8, 8)), (512, (8, 0)), (512, (0, 8))]
)
def test_F17_alignment_is_of_item_and_base(place, rng, item_size_bytes, leads):
    arrays = {
        "src": Guarded.random(rng, np.uint8, (4, item_size_bytes), lead=leads[0]),
        "dst": Guarded.random(rng, np.uint8, (4, item_size_bytes), lead=leads[1]),
        "src_indices": Guarded.of(rng, [0, 1, 2, 3], np.int64),
        "dst_indices": Guarded.of(rng, [3, 2, 1, 0], np.int64),
    }
    after = call(place, hisparse.copy_items, arrays, item_size_bytes=item_size_bytes)
    assert np.array_equal(after["dst"].view, arrays["src"].view[::-1])
    sizes = {"num_top_k": 20, "hot_buffer_size": 32, "item_size_bytes": item_size_bytes}
    check(place, make_case(rng, [random_row(rng, 90, 20, 32, 0.4)], pool_leads=leads, **sizes))


@pytest.mark.parametrize("item_size_bytes", [576, 656])
def test_F18_item_sizes_of_the_models_are_served_without_a_warning(place, rng, item_size_bytes):
    rows = [random_row(rng, 300, 64, 96, 0.4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(place, make_case(rng, rows, num_top_k=64, hot_buffer_size=96, item_size_bytes=item_size_bytes))


def test_F21_a_host_cache_in_mapped_memory(cpu_place, rng):
    memory = mmap.mmap(-1, 8 * 2**20)
    src = np.frombuffer(memory, np.uint8)[: 16 * 512].reshape(16, 512)
    src[:] = rng.integers(0, 256, src.shape)
    dst = np.zeros((16, 512), np.uint8)
    hisparse.copy_items(src, dst, np.arange(16), np.arange(16)[::-1].copy(), 512)
    assert np.array_equal(dst, src[::-1])


WRONG_DTYPES = [
    ("seq_lens", np.int16),
    ("seq_lens", np.float32),
    ("req_pool_indices", np.uint8),
    ("top_k_tokens", np.int64),
    ("top_k_device_locs", np.int64),
    ("host_cache_locs", np.int32),
    ("device_buffer_locs", np.int64),
    ("device_buffer_tokens", np.int64),
    ("lru_slots", np.int32),
    ("num_real_reqs", np.int64),
    ("miss_src", np.int32),
    ("miss_dst", np.int64),
    ("miss_count", np.int64),
]


@pytest.mark.parametrize(("name", "dtype"), WRONG_DTYPES, ids=lambda value: getattr(value, "__name__", value))
def test_F30_a_wrong_dtype_names_argument_got_and_wanted(place, rng, name, dtype):
    case = make_case(rng, [random_row(rng, 50, 8, 16)], num_top_k=8, hot_buffer_size=16, num_real_reqs=1)
    wanted = case[name].dtype.name
    with np.errstate(all="ignore"):
        case.arrays[name] = Guarded.of(rng, case[name].astype(dtype))
    refused(place, case, TypeError, rf"{name}.*{wanted}|{name}.*int64.*")
    with pytest.raises(TypeError, match=np.dtype(dtype).name):
        run(place, case)


def test_F31_rows_may_be_strided_but_not_their_elements(place, rng):
    row = Row(50, [20, 1, 2, 49, 3, 3, -1, 22], {5: 3, 9: 22})
    case = make_case(rng, [row], num_top_k=8, hot_buffer_size=16)
    for name in ("top_k_tokens", "top_k_device_locs"):
        case.arrays[name] = Guarded.random(rng, np.int32, (1, 32))
    case["top_k_tokens"][0, :8] = row.top_k

    def strided(name):
        return lambda views: views | {name: views[name][:, ::2]}

    for name in ("top_k_tokens", "top_k_device_locs"):
        refused(place, case, ValueError, name, strided(name))
    case.arrays["top_k_device_locs"] = Guarded.random(rng, np.int32, (1, 8), row_stride=32)
    check(place, case)


def test_F31_strided_indices(place, rng):
    arrays = {
        "src": Guarded.random(rng, np.uint8, (40, 16)),
        "dst": Guarded.random(rng, np.uint8, (40, 16)),
        "src_indices": Guarded.of(rng, np.arange(32), np.int64),
        "dst_indices": Guarded.of(rng, np.arange(16), np.int64),
    }

    def strided(views):
        return views | {"src_indices": views["src_indices"][::2]}

    with pytest.raises(ValueError, match="src_indices"):
        call(place, hisparse.copy_items, arrays, strided, item_size_bytes=16)


def test_F32_a_permuted_pool_is_refused(place, rng):
    pool = Guarded.random(rng, np.uint8, (12, 2, 16, 8, 16))
    flat = Guarded.random(rng, np.uint8, (12, 4096))
    locs = Guarded.of(rng, np.arange(6), np.int64)
    for permuted, plain in (("src", "dst"), ("dst", "src")):
        arrays = {permuted: pool, plain: flat, "src_indices": locs, "dst_indices": locs}

        def permute(views, name=permuted):
            return views | {name: views[name].swapaxes(2, 3)}  # of NumPy and of torch

        with pytest.raises(ValueError, match=f"{permuted}.*contiguous"):
            call(place, hisparse.copy_items, arrays, permute, item_size_bytes=4096)


def test_F32_a_layer_of_a_packed_pool_is_refused(place, rng):
    """Rows a whole block apart: block index * item is not where they are."""
    arrays = {
        "src": Guarded.random(rng, np.uint8, (2070, 3, 64)),
        "dst": Guarded.random(rng, np.uint8, (2070, 64)),
        "src_indices": Guarded.of(rng, [2066, 0], np.int64),
        "dst_indices": Guarded.of(rng, [1, 2], np.int64),
    }
    with pytest.raises(ValueError, match=r"src.*contiguous"):
        call(place, hisparse.copy_items, arrays, lambda v: v | {"src": v["src"][:, 1]}, item_size_bytes=64)


def test_F32_the_storage_offset_of_a_pool_is_honoured(place, rng):
    arrays = {
        "src": Guarded.random(rng, np.float32, (2070, 16)),
        "dst": Guarded.random(rng, np.float32, (2070, 16)),
        "src_indices": Guarded.of(rng, [2062, 0], np.int64),
        "dst_indices": Guarded.of(rng, [1, 2060], np.int64),
    }
    after = call(
        place, hisparse.copy_items, arrays, lambda v: v | {"src": v["src"][4:], "dst": v["dst"][7:]}, item_size_bytes=64
    )
    expected = {name: array.copy() for name, array in arrays.items()}
    reference.item_rows(expected["dst"].view, 64)[[8, 2067]] = reference.item_rows(expected["src"].view, 64)[[2066, 4]]
    assert_same(after, expected)


def test_F34_host_locs_are_not_device_locs(place, rng):
    case = make_case(rng, [Row(40, [3, 30, 12, 39], {0: 12})], num_top_k=4, hot_buffer_size=8, stale_host_locs=False)
    rid = case["req_pool_indices"][0]
    case["host_cache_locs"][rid, :40] = np.arange(40)[::-1]
    case["device_buffer"][case["device_buffer_locs"][rid, [0, 8]]] = case["host_cache"][[39 - 12, 0]]
    after = check(place, case)
    for token, loc in zip((3, 30, 12, 39), after["top_k_device_locs"][0], strict=False):
        assert np.array_equal(after["device_buffer"][loc], case["host_cache"][39 - token])


def test_F35_slots_that_were_never_initialised(place, rng):
    """The buffer of a request grew from 8 to 16 slots: the new ones hold garbage, which is never an index."""
    row = Row(20, [2, 9, 17, 18], np.array([*range(8), *[0x7F7F7F7F] * 8]))
    after = check(place, make_case(rng, [row], num_top_k=4, hot_buffer_size=16))
    assert after.slots(0)[0] == 2 and after.misses(0) == 3


IMPORT_AND_CALL = """
import sys
{before}
import hisparse
import numpy as np
src, dst = np.arange(64, dtype=np.uint8).reshape(4, 16), np.zeros((4, 16), np.uint8)
hisparse.copy_items(src, dst, np.array([0, 3]), np.array([1, 2]), 16)
assert (dst[1] == src[0]).all() and (dst[2] == src[3]).all() and not dst[[0, 3]].any()
{after}
"""
TORCH_CALL = """
src, dst = torch.arange(64, dtype=torch.uint8).view(4, 16), torch.zeros(4, 16, dtype=torch.uint8)
hisparse.copy_items(src, dst, torch.tensor([0, 3]), torch.tensor([1, 2]), 16)
assert (dst[1] == src[0]).all() and (dst[2] == src[3]).all() and not dst[0].any()
assert not torch.cuda.is_initialized()
"""


def run_python(source: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | environment,
        cwd=os.path.dirname(__file__),  # not the root of the repository, where an uncompiled hisparse lies
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_F36_without_torch():
    run_python(IMPORT_AND_CALL.format(before="sys.modules['torch'] = None", after=""))


def test_F36_import_and_arrays_of_numpy_do_not_import_torch():
    run_python(IMPORT_AND_CALL.format(before="", after="assert 'torch' not in sys.modules"))


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_F36_torch_with_and_without_the_dlpack_exchange_api():
    api = "torch.Tensor.__dlpack_c_exchange_api__"
    without_api = f"import torch\nif hasattr(torch.Tensor, '{api.split('.')[-1]}'): del {api}"
    for before in ("import torch", without_api):
        run_python(IMPORT_AND_CALL.format(before=before, after=TORCH_CALL))
    run_python(IMPORT_AND_CALL.format(before="", after="import torch" + TORCH_CALL))


def test_F41_the_environment_is_read_at_the_call_and_an_option_wins(monkeypatch, rng):
    case = make_case(rng, [random_row(rng, 50, 8, 16)], num_top_k=8, hot_buffer_size=16)

    def accepts(block_size: int) -> bool:
        try:
            hisparse.load_cache_to_device_buffer_mla(**case.copy().views(), **case.sizes, block_size=block_size)
        except ValueError as error:
            assert "block_size" in str(error)
            return False
        return True

    monkeypatch.delenv("HISPARSE_CPU_WARP_SIZE", raising=False)
    assert hisparse.cpu.get_options().warp_size == 64 and not accepts(96)
    monkeypatch.setenv("HISPARSE_CPU_WARP_SIZE", "32")
    assert hisparse.cpu.get_options().warp_size == 32 and accepts(96)
    with hisparse.cpu.options(warp_size=64):
        assert hisparse.cpu.get_options().warp_size == 64 and not accepts(96)
        with pytest.raises(KeyError), hisparse.cpu.options(warp_size=32):
            assert accepts(96)
            raise KeyError
        assert not accepts(96)
    assert accepts(96)
    monkeypatch.setenv("HISPARSE_CPU_WARP_SIZE", "48")
    with pytest.raises(ValueError, match="HISPARSE_CPU_WARP_SIZE"):
        hisparse.copy_items(np.zeros(4, np.uint8), np.zeros(4, np.uint8), np.arange(1), np.arange(1), 4)
