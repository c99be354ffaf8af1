"""translate_padded_hisparse_locations against its PyTorch and NumPy equivalents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from places import GpuPlace, Guarded, torch

import hisparse

DTYPES = (np.int32, np.int64)


def translate(place, mapping: Guarded, locations: Guarded, step: int = 1):
    raws, views = zip(
        *(place.put(name, array) for name, array in (("mapping", mapping), ("locations", locations))), strict=True
    )
    with place.options():
        output = hisparse.translate_padded_hisparse_locations(views[0], views[1][::step])
    for raw, array in zip(raws, (mapping, locations), strict=True):
        assert np.array_equal(place.fetch(raw), array.raw)
    return output


def check_translation(place, mapping: Guarded, locations: Guarded, step: int = 1):
    output = translate(place, mapping, locations, step)
    chosen = locations.view[::step]
    expected = np.where(chosen < 0, chosen, mapping.view[np.maximum(chosen, 0)] if len(mapping.view) else 0)
    if place.library == "torch":
        assert isinstance(output, torch.Tensor) and output.is_contiguous()
        output = output.cpu().numpy()
    assert output.dtype == np.promote_types(mapping.dtype, locations.dtype)
    assert output.shape == chosen.shape and output.flags.c_contiguous
    assert np.array_equal(output, expected.astype(output.dtype))


def random_arrays(rng, count, entries=50, mapping_dtype=np.int64, locations_dtype=np.int32, padding=0.3):
    values = rng.integers(0, entries, count)
    values[rng.random(count) < padding] = -1
    info = np.iinfo(mapping_dtype)
    mapping = rng.integers(info.min, info.max, entries, mapping_dtype, endpoint=True)
    return Guarded.of(rng, mapping, lead=8), Guarded.of(rng, values, locations_dtype, lead=8)


@pytest.mark.parametrize(("mapping_dtype", "locations_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_dtypes(place, rng, mapping_dtype, locations_dtype):
    check_translation(place, *random_arrays(rng, 300, 50, mapping_dtype, locations_dtype))


@pytest.mark.parametrize("count", [0, 1, 31, 255, 256, 257, 5000])
def test_counts(place, rng, count):
    check_translation(place, *random_arrays(rng, count))


@pytest.mark.parametrize("step", [2, 3, 7])
def test_strides(place, rng, step):
    for dtypes in itertools.product(DTYPES, DTYPES):
        check_translation(place, *random_arrays(rng, 200, 50, *dtypes), step)


def test_a_column_of_a_table_and_a_reversed_array(rng):
    mapping, table = rng.integers(0, 99, 20), rng.integers(-2, 20, (30, 5)).astype(np.int32)
    for locations in (table[:, 3], table[::-2, 0], table[:1, 2], table[3, ::-1]):
        output = hisparse.translate_padded_hisparse_locations(mapping, locations)
        assert np.array_equal(output, np.where(locations < 0, locations, mapping[locations]))


def test_one_location_for_all(place, rng):
    mapping, locations = random_arrays(rng, 1)
    locations.view[0] = 7
    views = [place.put("", array)[1] for array in (mapping, locations)]
    many = np.broadcast_to(views[1], 40) if place.library == "numpy" else views[1].expand(40)
    with place.options():
        output = hisparse.translate_padded_hisparse_locations(views[0], many)
    assert output.tolist() == [int(mapping.view[7])] * 40


def test_every_negative_location_is_padding(place, rng):
    values = [-1, -7, -(2**31), 3, -(2**63), -(2**32) - 5]
    mapping, _ = random_arrays(rng, 1)
    check_translation(place, mapping, Guarded.of(rng, values, np.int64))
    check_translation(place, mapping, Guarded.of(rng, values[:4], np.int32))
    small, _ = random_arrays(rng, 1, mapping_dtype=np.int32)
    check_translation(place, small, Guarded.of(rng, values, np.int64))


def test_padding_needs_no_mapping(place, rng):
    check_translation(place, Guarded.of(rng, np.zeros(0, np.int32)), Guarded.of(rng, [-1, -5], np.int64))


def test_a_location_past_the_end_reads_nothing(place, rng):
    mapping, locations = random_arrays(rng, 6, padding=0)
    locations.view[:] = [49, 50, 2**31 - 1, 51, 0, 1000]
    output = translate(place, mapping, locations)
    expected = [int(mapping.view[49]), -1, -1, -1, int(mapping.view[0]), -1]
    assert output.tolist() == expected


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_the_equivalent_in_torch(torch_place, rng):
    for dtypes in itertools.product(DTYPES, DTYPES):
        mapping, locations = (torch_place.put("", a)[1] for a in random_arrays(rng, 100, 50, *dtypes))
        with torch_place.options():
            output = hisparse.translate_padded_hisparse_locations(mapping, locations)
        expected = torch.where(locations < 0, locations, mapping[locations.clamp(min=0).long()])
        assert output.dtype == expected.dtype == torch.promote_types(mapping.dtype, locations.dtype)
        assert torch.equal(output, expected) and output.device == locations.device


WRONG = [
    ("mapping", lambda a: a.astype(np.int16), TypeError, "int32 or int64"),
    ("mapping", lambda a: a.astype(np.float32), TypeError, "int32 or int64"),
    ("mapping", lambda a: a.astype(np.uint32), TypeError, "int32 or int64"),
    ("mapping", lambda a: a[None], ValueError, "shape [entries]"),
    ("mapping", lambda a: np.repeat(a, 2)[::2], ValueError, "contiguous"),
    ("mapping", lambda a: None, TypeError, "numpy.ndarray"),
    ("mapping", lambda a: [1, 2], TypeError, "numpy.ndarray"),
    ("locations", lambda a: a.astype(np.int8), TypeError, "int32 or int64"),
    ("locations", lambda a: a.astype(bool), TypeError, "int32 or int64"),
    ("locations", lambda a: a[None], ValueError, "shape [N]"),
    ("locations", lambda a: a[0, ...], ValueError, "shape [N]"),
    ("locations", lambda a: a.astype(">i4"), TypeError, "int32 or int64"),
    ("locations", lambda a: 3, TypeError, "numpy.ndarray"),
]


@pytest.mark.parametrize(("name", "change", "error", "expected"), WRONG)
def test_wrong_arguments(name, change, error, expected):
    arguments = {"mapping": np.arange(9), "locations": np.arange(5, dtype=np.int32)}
    arguments[name] = change(arguments[name])
    with pytest.raises(error) as raised:
        hisparse.translate_padded_hisparse_locations(**arguments)
    message = str(raised.value)
    assert message.startswith(f"{name}: expected ") and expected in message and ", got " in message


@pytest.mark.gpu
def test_in_a_graph(rng):
    mapping, locations = (GpuPlace().put("", a)[1] for a in random_arrays(rng, 3000, 400))
    hisparse.translate_padded_hisparse_locations(mapping, locations[::3])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = hisparse.translate_padded_hisparse_locations(mapping, locations[::3])
    for _ in range(3):
        locations.random_(-1, 400)
        mapping.random_(0, 10**6)
        graph.replay()
        chosen = locations[::3]
        assert torch.equal(output, torch.where(chosen < 0, chosen, mapping[chosen.clamp(min=0).long()]))
