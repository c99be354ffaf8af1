"""The programs in examples/ run and check what they say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from places import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def attention(monkeypatch):
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("attention", EXAMPLES / "attention.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "attention", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_over_host_memory_equals_full_attention(attention, device):
    difference, cache = attention.run(device, steps=24)
    assert difference < 2e-6
    lengths = sorted(cache.length(request) for request in cache.requests)
    assert lengths == sorted(length + 24 for length in attention.PROMPTS)
    assert lengths[0] < attention.HOT_BUFFER < lengths[1] < lengths[-1]
    statistics = cache.statistics()
    assert 0 < statistics.misses < statistics.reads / 2


@pytest.mark.parametrize("fault", ["stale item", "wrong slot"])
def test_attention_notices_a_fault(attention, monkeypatch, fault):
    """One wrong byte, or two locs exchanged, in one step of one layer."""
    swap_in, calls = attention.hisparse.HotBufferCache.swap_in, []

    def faulty(self, layer, top_k):
        locs = swap_in(self, layer, top_k)
        calls.append(locs)
        if len(calls) == 20 and fault == "stale item":
            self.device_items(layer)[locs[0, 3], 5] ^= 64
        elif len(calls) == 20:
            locs[0, [1, 2]] = locs[0, [2, 1]]
        return locs

    monkeypatch.setattr(attention.hisparse.HotBufferCache, "swap_in", faulty)
    with pytest.raises(AssertionError, match="not the bits of a full cache"):
        attention.run("cpu", steps=12)
    assert len(calls) == 20 and torch is not None
