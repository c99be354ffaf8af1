"""transfer_cache_dsv4_mla, and the way of a DeepSeek-V4 token to the host and back."""

from __future__ import annotations

import numpy as np
import pytest
from family_cases import check_dsv4, dsv4_case, get_token, put_token, random_pages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import GpuPlace, Guarded, assert_same, make_place, torch
from swap_in_cases import Row

import hisparse
from hisparse import kvcacheio


def address_of(view) -> int:
    """What a table holds. On a machine with a GPU, memory of the CPU target need not be the GPU's too."""
    if isinstance(view, np.ndarray):
        return view.ctypes.data
    return kvcacheio.get_device_accessible_ptr(view, 0) if view.is_cuda or view.is_pinned() else view.data_ptr()


def transfer(place, src: list[Guarded], dst: list[Guarded], src_indices, dst_indices, **options) -> list[Guarded]:
    """`dst` as the op leaves it. Each layer is an allocation of its own."""
    raws = [[place.put("src" if side is src else "dst", layer) for layer in side] for side in (src, dst)]
    tables = [np.array([address_of(view) for _, view in side], np.uint64) for side in raws]
    arguments = [Guarded.of(np.random.default_rng(0), values) for values in tables]
    arguments += [
        Guarded.of(np.random.default_rng(1), values, np.int64, lead=8) for values in (src_indices, dst_indices)
    ]
    views = [place.put("table", array)[1] for array in arguments]
    with place.options():
        assert hisparse.transfer_cache_dsv4_mla(*views, **options) is None
    for layer, (raw, _) in zip(src, raws[0], strict=True):
        assert np.array_equal(place.fetch(raw), layer.raw)
    return [layer.with_raw(place.fetch(raw)) for layer, (raw, _) in zip(dst, raws[1], strict=True)]


def check_transfer(place, rng, layers, src_indices, dst_indices, tokens=(200, 150), leads=(0, 0), **options):
    src = [random_pages(rng, tokens[0], leads[0]) for _ in range(layers)]
    dst = [random_pages(rng, tokens[1], leads[1]) for _ in range(layers)]
    expected = [layer.copy() for layer in dst]
    for source, target in zip(src, expected, strict=True):
        for i, j in zip(src_indices, dst_indices, strict=True):
            if i >= 0 and j >= 0:
                put_token(target.view, j, get_token(source.view, i))
    actual = transfer(place, src, dst, src_indices, dst_indices, **options)
    for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_same({f"layer {number}": got}, {f"layer {number}": want})


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_same_tokens_in_every_layer(place, rng, layers):
    check_transfer(place, rng, layers, rng.integers(0, 200, 90), rng.permutation(150)[:90])


@pytest.mark.parametrize("leads", [(0, 0), (8, 0), (0, 8), (8, 8)], ids=str)
def test_addresses_of_8_and_of_16_bytes(place, rng, leads):
    check_transfer(place, rng, 2, rng.integers(0, 200, 70), rng.permutation(150)[:70], leads=leads)


def test_layers_of_different_alignment(place, rng):
    src = [random_pages(rng, 64, lead) for lead in (0, 8, 0, 16)]
    dst = [random_pages(rng, 64, lead) for lead in (0, 0, 8, 0)]
    order = rng.permutation(64)
    for got, old, source in zip(transfer(place, src, dst, order, np.arange(64)), dst, src, strict=True):
        expected = old.copy()
        for target, token in enumerate(order):
            put_token(expected.view, target, get_token(source.view, token))
        assert_same({"layer": got}, {"layer": expected})


def test_a_negative_index_on_either_side_skips_the_token(place, rng):
    src_indices = [3, -1, 5, -(2**63), 7, 9]
    check_transfer(place, rng, 3, src_indices, [1, 2, -1, 4, -(2**40), 0])
    check_transfer(place, rng, 1, [-1, -1], [-1, 3])


@pytest.mark.parametrize("count", [0, 1, 2, 31, 33, 64, 65, 150])
@pytest.mark.parametrize("block_size", [64, 128, 1024])
def test_counts_and_blocks(sweep_place, rng, count, block_size):
    indices = rng.integers(0, 200, count), rng.permutation(150)[:count]
    check_transfer(sweep_place, rng, 2, *indices, block_size=block_size)


def test_no_layers(place, rng):
    check_transfer(place, rng, 0, [1, 2], [3, 4])


def test_within_one_pool(cpu_place, rng):
    pool = random_pages(rng, 128)
    table = np.array([pool.view.ctypes.data], np.uint64)
    expected = pool.copy()
    for i in range(64):
        put_token(expected.view, 64 + i, get_token(pool.view, i))
    with cpu_place.options():
        hisparse.transfer_cache_dsv4_mla(table, table, np.arange(64), np.arange(64, 128))
    assert_same({"pool": pool}, {"pool": expected})


PLACES = ["cpu64-wave-numpy", "cpu32-chunk-numpy", "cpu32-wave-numpy", "cpu64-chunk-numpy"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_to_the_host_and_back_is_the_identity(data):
    """Device -> host by the transfer, host -> device by the swap-in: the bytes of every token come back, and all others
    stay what they were."""
    round_trip(data.draw(st.sampled_from(PLACES)), data.draw(st.integers(0, 2**32)), data.draw(st.integers(1, 200)))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
def test_to_the_host_and_back_on_a_gpu(seed):
    round_trip("gpu", seed, 150 + seed)


def round_trip(place_name: str, seed: int, tokens: int) -> None:
    place, rng = make_place(place_name), np.random.default_rng(seed)
    leads = rng.choice([0, 8], 3)
    device, host = random_pages(rng, tokens + 9, leads[0]), random_pages(rng, tokens + 30, leads[1])
    locs, host_locs = rng.permutation(tokens + 9)[:tokens], rng.permutation(tokens + 30)[:tokens]
    # On a GPU the transfer writes pinned memory: the names say which side is on the host.
    (host_after,) = transfer(BothWays(place), [device], [host], locs, host_locs)

    case = dsv4_case(rng, [Row(tokens + 1, rng.permutation(tokens), {})], num_top_k=tokens, hot_buffer_size=tokens)
    rid = case["req_pool_indices"][0]
    case["host_cache_locs"][rid, :tokens] = host_locs
    case["device_buffer_locs"][rid, :tokens] = rng.permutation(tokens + 8)[:tokens]
    case.plain["host_cache"][:] = 0
    case.arrays["host_cache"] = host_after
    for loc in range(min(len(case.plain["host_cache"]), tokens + 30)):
        case.plain["host_cache"][loc] = get_token(host_after.view, loc)
    if len(case.plain["host_cache"]) < tokens + 30:  # the reference needs all rows
        rows = np.array([get_token(host_after.view, loc) for loc in range(tokens + 30)])
        case.plain.arrays["host_cache"] = Guarded.of(rng, rows)
    after = check_dsv4(place, case)
    entries = case["top_k_tokens"][0, :tokens]
    for token, loc in zip(entries, after["top_k_device_locs"][0, :tokens], strict=True):
        assert np.array_equal(get_token(after["device_buffer"], loc), get_token(device.view, locs[token]))


class BothWays:
    """A place where the pool that is written lies on the host and the other one on the device."""

    def __init__(self, place):
        self.place, self.fetch, self.options = place, place.fetch, place.options

    def put(self, name: str, array: Guarded):
        return self.place.put({"src": "device", "dst": "host_cache"}.get(name, name), array)


@pytest.mark.gpu
def test_more_layers_than_blocks_at_once():
    rng = np.random.default_rng(0)
    check_transfer(GpuPlace(), rng, 700, rng.integers(0, 64, 3), rng.permutation(64)[:3], tokens=(64, 64))
    assert torch.cuda.is_available()
