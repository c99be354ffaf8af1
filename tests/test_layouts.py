"""Where the layouts put an item, against NumPy's strides for small pools and Python's integers for large ones."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def layouts(tmp_path_factory):
    compiler = os.environ.get("CXX", "g++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler {compiler[0]}")
    path = tmp_path_factory.mktemp("layouts") / "liblayouts.so"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-ftrapv", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, TESTS / "layouts_library.cpp", "-o", path], check=True)
    library = ctypes.CDLL(str(path))

    def function(name):
        raw = getattr(library, name)
        raw.restype = ctypes.c_int64
        return lambda *arguments: raw(*map(ctypes.c_int64, arguments))

    transfers = ("layer_first", "page_first", "page_head")
    items = ("linear", "linear_of_32_bits", "dsv4", "dsv4_of_32_bits", "dsv4_rows", "block_index_of")
    return {name: function(name) for name in (*transfers, *items)}


def offset_in(array: np.ndarray, *place: int) -> int:
    return sum(index * stride for index, stride in zip(place, array.strides, strict=True))


def test_layer_first(layouts):
    pool = np.empty((50, 5, 16), np.uint8)  # [token, head, bytes]
    for token in range(50):
        for head in range(5):
            assert layouts["layer_first"](80, 5, token, head) == offset_in(pool, token, head, 0)


def test_page_first(layouts):
    pool = np.empty((50, 7, 24), np.uint8)  # [token, layer, bytes]
    for token in range(50):
        for layer in range(7):
            assert layouts["page_first"](24, 7 * 24, token, layer) == offset_in(pool, token, layer, 0)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("head_num", [1, 4, 5])
def test_page_head(layouts, page_size, head_num):
    pool = np.empty((4, head_num, page_size, 3, 8), np.uint8)  # [page, head, token in page, layer, bytes]
    item, layout_dim = 8 * head_num, 3 * 8 * head_num
    for page, head, token, layer, _ in np.ndindex(*pool.shape[:4], 1):
        got = layouts["page_head"](item, layout_dim, page_size, head_num, page * page_size + token, layer, head)
        assert got == offset_in(pool, page, head, token, layer, 0)


def test_F15_offsets_beyond_32_bits(layouts):
    page_dim = 2**20
    for page_size in (1, 16, 64):
        assert layouts["page_head"](2**10, page_dim // page_size, page_size, 1, 2**21 * page_size, 0, 0) == 2**41
    assert layouts["page_first"](2**10, page_dim, 2**21, 0) == 2**41
    assert layouts["layer_first"](page_dim, 1, 2**21, 0) == 2**41
    assert layouts["page_first"](2**36, 61 * 2**36, 0, 60) == 60 * 2**36
    assert layouts["page_head"](2**36, 61 * 2**36, 1, 4, 0, 60, 0) == 60 * 2**34


def test_random_offsets_up_to_63_bits(layouts):
    rng = np.random.default_rng(0)

    def any_of(bits: int) -> int:
        return int(rng.integers(1, 2 ** int(rng.integers(1, bits))))

    beyond = 0
    for _ in range(3000):
        head_num, page_size, layers = any_of(7), any_of(8), any_of(7)
        item = any_of(12) * head_num
        layout_dim = layers * item + any_of(6) * head_num
        token, layer, head = any_of(31), int(rng.integers(layers)), int(rng.integers(head_num))
        part, row = item // head_num, layout_dim // head_num
        page, within = divmod(token, page_size)
        expected = ((page * head_num + head) * page_size + within) * row + layer * part
        assert layouts["page_head"](item, layout_dim, page_size, head_num, token, layer, head) == expected
        assert layouts["page_first"](item, layout_dim, token, layer) == token * layout_dim + layer * item
        assert layouts["layer_first"](item, head_num, token, head) == token * item + head * part
        beyond += expected > 2**41
    assert beyond > 50


# The layouts of the swap-in's pools


def test_dsv4_pages(layouts):
    pages = np.empty((3, 37_440), np.uint8)
    values = pages[:, : 64 * 576].reshape(3, 64, 576)
    scales = pages[:, 36_864 : 36_864 + 64 * 8].reshape(3, 64, 8)
    for token in range(3 * 64):
        page, place = divmod(token, 64)
        value, scale = offset_in(values, page, place, 0), 36_864 + offset_in(scales, page, place, 0)
        for name in ("dsv4", "dsv4_of_32_bits"):
            assert [layouts[name](token, at) for at in (0, 1, 568, 575)] == [value, value + 1, value + 568, value + 575]
            assert [layouts[name](token, at) for at in (576, 583)] == [scale, scale + 7]
    assert [layouts["dsv4_rows"](n) for n in (0, 37_439, 37_440, 3 * 37_440 - 1, 2**41)] == [
        0,
        0,
        64,
        128,
        2**41 // 37_440 * 64,
    ]


def test_F15_dsv4_offsets_beyond_2_to_the_41(layouts):
    rng = np.random.default_rng(1)
    beyond = 0
    for token in (*(int(rng.integers(2 ** int(rng.integers(1, 48)))) for _ in range(3000)), 2**32, 2**32 - 1, 2**42):
        page, place = divmod(token, 64)
        at = int(rng.integers(584))
        expected = page * 37_440 + (place * 576 + at if at < 576 else 36_864 + place * 8 + at - 576)
        assert layouts["dsv4"](token, at) == expected
        if token < 2**32:
            assert layouts["dsv4_of_32_bits"](token, at) == expected
        beyond += expected > 2**41
    assert beyond > 100


def test_F15_linear_offsets_beyond_2_to_the_41(layouts):
    for loc, at, item in ((2**31, 5, 2**10), (2**32 - 1, 583, 584), (2**21, 0, 2**20), (0, 7, 8), (2**40, 1, 1152)):
        assert layouts["linear"](loc, at, item) == loc * item + at
        if loc < 2**32:
            assert layouts["linear_of_32_bits"](loc, at, item) == loc * item + at


def test_the_block_of_every_entry(layouts):
    for tokens in (*range(1, 130), 1000, 4096, 8191, 32_765, 32_766):
        for entry in {0, tokens - 1, tokens, 32_765, *range(0, 32_766, 97), *range(tokens - 1, 32_766, tokens)}:
            if entry < 32_766:
                assert layouts["block_index_of"](entry, tokens) == entry // tokens
