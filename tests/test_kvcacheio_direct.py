"""The direct transfers of hisparse.kvcacheio, which the copy engine or the CPU does, against the reference."""

from __future__ import annotations

import kvcacheio_reference as reference
import numpy as np
import pytest
from direct_cases import DIRECT_OPS, DirectCase, pages
from kvcacheio_cases import DIRECTIONS
from places import HOST_POOLS, GpuPlace, Guarded, assert_same, torch

import hisparse.kvcacheio as kvcacheio


@pytest.fixture(params=DIRECT_OPS)
def op(request):
    return request.param


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("sides", [1, 2])
def test_pages(place, rng, op, page_size, sides):
    DirectCase(rng, op, page_size=page_size, sides=sides).check(place)


@pytest.mark.parametrize("token", [(132,), (144,), (1, 576), (584,), (2, 4, 82), (1,)], ids=str)
def test_token_sizes(place, rng, op, token):
    DirectCase(rng, op, token=token, page_size=4).check(place)


@pytest.mark.parametrize("layers", [1, 2, 61, 80])
def test_layers(place, rng, op, layers):
    DirectCase(rng, op, layers=layers, page_size=2, token=(24,)).check(place)


@pytest.mark.parametrize(("layers", "layer_id"), [(1, 0), (1, 4), (2, 3), (5, 0), (3, 1)])
def test_some_layers_of_a_pool(place, rng, layers, layer_id):
    for sides in (1, 2):
        DirectCase(rng, DIRECT_OPS[1], layers=layers, sides=sides, layer_id=layer_id, pool_layers=5, page_size=4).check(
            place
        )
    DirectCase(rng, DIRECT_OPS[2], layers=layers, pool_layers=5, page_size=4).check(place)


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_numbers_of_pages(place, rng, op, count):
    DirectCase(rng, op, count=count, page_size=2).check(place)


def test_only_the_first_index_of_a_page_counts_beside_page_first_pools(place, rng):
    for op in DIRECT_OPS[1:]:
        case = DirectCase(rng, op, page_size=4)
        for indices in case.indices:
            indices.view.reshape(-1, 4)[:, 1:] = 0
        case.check(place)


def test_layers_take_pages_that_start_anywhere(place, rng):
    case = DirectCase(rng, DIRECT_OPS[1], page_size=4)
    case.indices[1].view[:] = pages(rng, 5, 4, 7) + 3
    case.check(place)


def test_runs_of_any_length(place, rng):
    """Tokens that follow one another on one side only, on both, across pages, and backwards."""
    case = DirectCase(rng, DIRECT_OPS[0], page_size=2, count=8, layers=2)
    for src, dst in [
        ([0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]),
        ([0, 1, 2, 3, 4, 5], [7, 8, 9, 1, 2, 3]),
        ([5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]),
        ([5, 5, 5, 5], [0, 1, 2, 3]),
        ([9, 10, 0, 1, 11, 12], [1, 2, 3, 4, 5, 6]),
        ([21, 20], [20, 21]),
    ]:
        case.indices = [Guarded.of(rng, indices, np.int64) for indices in (src, dst)]
        case.check(place)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("indices_on_host", [True, False])
@pytest.mark.parametrize("stream", ["default", "side"])
def test_directions(rng, op, direction, indices_on_host, stream):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side if stream == "side" else torch.cuda.default_stream()):
        for page_size in (1, 64):
            DirectCase(rng, op, page_size=page_size, count=30).check(GpuPlace(), direction, indices_on_host)


@pytest.mark.parametrize("count", [1, 8192, 8193, 20_000])
def test_F40_many_pages(place, rng, op, count):
    if not isinstance(place, GpuPlace) and place.library == "torch":
        pytest.skip("one library will do")
    DirectCase(rng, op, count=count, page_size=1, layers=1, sides=1, token=(8,)).check(place)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8192, 8193, 20_000])
def test_F40_many_pages_on_a_side_stream(rng, op, count):
    with torch.cuda.stream(torch.cuda.Stream()):
        DirectCase(rng, op, count=count, page_size=2, layers=2, sides=1, token=(16,)).check(GpuPlace())


def embedding_case(rng, place, direction="h2d", ranges=((3, 0, 4), (0, 10, 1), (12, 5, 0), (7, 14, 6))):
    src, dst = (Guarded.random(rng, np.float32, (20, 9), lead=lead) for lead in (4, 0))
    starts = [[r[n] for r in ranges] for n in range(3)]
    expected = dst.copy()
    reference.transfer_embedding_ranges_direct(src.view, expected.view, *starts)
    placed = [
        place.put(HOST_POOLS[0] if on_host else "", array)
        for on_host, array in zip(DIRECTIONS[direction], (src, dst), strict=True)
    ]
    kvcacheio.transfer_embedding_ranges_direct(*(view for _, view in placed), *starts)
    got = {"src": src.with_raw(place.fetch(placed[0][0])), "dst": dst.with_raw(place.fetch(placed[1][0]))}
    assert_same(got, {"src": src, "dst": expected})


def test_embedding_ranges(place, rng):
    embedding_case(rng, place)
    embedding_case(rng, place, ranges=())
    embedding_case(rng, place, ranges=((0, 0, 20),))
    embedding_case(rng, place, ranges=((20, 20, 0),))
    embedding_case(rng, place, ranges=((1, 2, 1), (1, 3, 1), (2, 4, 1)))


@pytest.mark.gpu
def test_embedding_ranges_to_the_host(rng):
    embedding_case(rng, GpuPlace(), "d2h")


def test_embedding_ranges_take_any_sequence_of_ints(rng):
    src, dst = (rng.integers(0, 100, (8, 3)) for _ in range(2))
    kvcacheio.transfer_embedding_ranges_direct(src, dst, (0, 4), np.array([1, 6]), [np.int32(2), 1])
    assert np.array_equal(dst[1:3], src[0:2]) and np.array_equal(dst[6], src[4])


def layer_copy_case(rng, rows, targets, sources, strides=(24, 1, 656), array=np.asarray):
    layers = [Guarded.random(rng, np.uint8, (rows, stride)) for stride in strides]
    expected = [layer.copy() for layer in layers]
    for i, (layer, before) in enumerate(zip(expected, layers, strict=True)):
        for target, source in zip(targets, sources, strict=True):
            if target >= 0 and source >= 0:
                layer.view[target] = before.view[source]
        expected[i] = layer
    pointers = np.array([layer.view.ctypes.data for layer in layers], np.uint64)
    kvcacheio.copy_all_layer_kv_cache_cpu(
        *(array(a) for a in (pointers, np.array(strides), np.array(targets, np.int64), np.array(sources, np.int64)))
    )
    assert_same(dict(enumerate(layers)), dict(enumerate(expected)))


LOCS = {
    "apart": ([10, 11, 12], [0, 5, 3]),
    "forward": ([1, 2, 3, 4], [0, 1, 2, 3]),
    "backward": ([0, 1, 2, 3], [1, 2, 3, 4]),
    "cycle": ([0, 1, 2], [1, 2, 0]),
    "onto itself": ([3, 4], [3, 3]),
    "skipped": ([-1, 2, 3, 5], [0, -1, 7, -(2**40)]),
    "none": ([], []),
}


@pytest.mark.parametrize("locs", LOCS)
def test_rows_within_all_layers(rng, locs):
    layer_copy_case(rng, 13, *LOCS[locs])


def test_rows_within_all_layers_at_random(rng):
    for rows in (2, 30, 500):
        layer_copy_case(rng, rows, rng.permutation(rows).tolist(), rng.integers(0, rows, rows).tolist())


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_rows_within_all_layers_of_torch(rng):
    layer_copy_case(rng, 13, *LOCS["cycle"], array=torch.from_numpy)


def test_rows_of_no_layers():
    empty = np.zeros(0, np.int64)
    kvcacheio.copy_all_layer_kv_cache_cpu(empty.view(np.uint64), empty, np.arange(3), np.arange(3))


def test_the_address_of_host_memory(cpu_place, rng):
    array = rng.integers(0, 9, (4, 5))
    if torch is None or not torch.cuda.is_available():
        assert kvcacheio.get_device_accessible_ptr(array, 0) == array.ctypes.data
        assert kvcacheio.get_device_accessible_ptr(array[1:], 3) == array[1:].ctypes.data
    assert kvcacheio.get_device_accessible_ptr(array[:0], 0) == array.ctypes.data


@pytest.mark.gpu
def test_the_address_on_the_gpu():
    pinned, device = torch.zeros(100).pin_memory(), torch.zeros(100, device="cuda")
    assert kvcacheio.get_device_accessible_ptr(device[3:], 0) == device.data_ptr() + 12
    address = kvcacheio.get_device_accessible_ptr(pinned[2:], 0)
    assert torch.version.hip is not None or address == pinned.data_ptr() + 8
    with pytest.raises(ValueError, match="tensor: expected host memory"):
        kvcacheio.get_device_accessible_ptr(torch.zeros(2**20), 0)
    for tensor in (pinned, device):
        with pytest.raises(ValueError, match="device"):
            kvcacheio.get_device_accessible_ptr(tensor, torch.cuda.device_count())
