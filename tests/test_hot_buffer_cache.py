"""hisparse.HotBufferCache against a model that keeps every token: lives of requests, capacity, layouts, numbers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from cache_model import CheckedCache
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from places import torch

import hisparse
from hisparse.presets import PRESETS, Field, ItemFormat

SMALL = {"num_layers": 2, "max_requests": 3, "hot_buffer_size": 6, "top_k": 3, "host_tokens": 96}
BLOCKS = ItemFormat("blocks", (Field("head", "bfloat16", 10),), layout="key value", block_tokens=2)
ITEMS = [
    20,
    pytest.param("deepseek-v4-c4", id="dsv4"),
    pytest.param(BLOCKS, id="blocks"),
]

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
DEVICES = ["numpy", pytest.param("cpu", marks=needs_torch), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("prompt", [1, 4, 5, 6, 7, 8, 30])
def test_every_length_around_the_hot_buffer(device, item, prompt):
    """H = 6: prompts that fit, that fill it, and longer ones, each decoded past the point where it is full."""
    checked = CheckedCache(item, device, **SMALL)
    request = checked.admit(prompt)
    for _ in range(10):
        checked.step([request])
        checked.check_state()


def test_at_exactly_one_token_more_than_slots_nothing_is_copied(device):
    checked = CheckedCache(20, device, **SMALL)
    request = checked.admit(5)
    checked.step([request])
    assert checked.cache.length(request) == 6
    checked.step([request])  # H + 1: token 5 stays in slot 5, where it was the newest; token 6 is in slot H
    assert checked.cache.slot_tokens(request, 0).tolist() == [0, 1, 2, 3, 4, 5]
    assert checked.misses == 0


class Lives(RuleBasedStateMachine):
    """Requests come, decode in changing company, and go; pages of the host pool are reused in pieces."""

    @initialize(
        item=st.sampled_from([7, 20, "deepseek-v4-c4", BLOCKS]),
        page_size=st.sampled_from([1, 3, 8]),
        seed=st.integers(0, 2**32),
    )
    def start(self, item, page_size, seed):
        self.checked = CheckedCache(item, "numpy", seed, page_size=page_size, max_context=40, **SMALL)

    def unchanged(self, action):
        before = self.snapshot()
        with pytest.raises(hisparse.CapacityError) as raised:
            action()
        assert raised.value.needed > raised.value.available
        after = self.snapshot()
        assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)

    def snapshot(self):
        cache = self.checked.cache
        arrays = {name: value.copy() for name, value in vars(cache).items() if isinstance(value, np.ndarray)}
        arrays |= {f"pool {n}": pool.copy() for n, pool in enumerate(cache._pools.host + cache._pools.device)}
        lengths = {request: cache.length(request) for request in cache.requests}
        return arrays | {"lengths": sorted(lengths.items()), "free": (cache.free_requests, cache.free_host_tokens)}

    @rule(length=st.integers(1, 41), pieces=st.integers(1, 3))
    def admit(self, length, pieces):
        cache = self.checked.cache
        pages = -(-length // cache.page_size)
        if cache.free_requests == 0 or pages * cache.page_size > cache.free_host_tokens or length > cache.max_context:
            self.unchanged(lambda: self.checked.admit(length, pieces))
        else:
            self.checked.admit(length, pieces)

    @precondition(lambda self: self.checked.truth)
    @rule(data=st.data(), padding=st.integers(0, 2), steps=st.integers(1, 4))
    def step(self, data, padding, steps):
        requests = data.draw(st.lists(st.sampled_from(sorted(self.checked.truth)), unique=True))
        cache = self.checked.cache
        for _ in range(steps):
            growing = sum(cache.length(request) % cache.page_size == 0 for request in requests)
            too_long = any(cache.length(request) == cache.max_context for request in requests)
            if too_long or growing * cache.page_size > cache.free_host_tokens:
                self.unchanged(lambda: cache.schedule(requests))
            else:
                self.checked.step(requests, padding)

    @precondition(lambda self: self.checked.truth)
    @rule(data=st.data())
    def release(self, data):
        self.checked.release(data.draw(st.sampled_from(sorted(self.checked.truth))))

    @invariant()
    def state_is_right(self):
        if hasattr(self, "checked"):
            self.checked.check_state()


Lives.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
test_lives_of_requests = Lives.TestCase


@pytest.mark.parametrize("item", ITEMS)
def test_fragmented_pages_are_reused(device, item):
    checked = CheckedCache(item, device, page_size=4, **SMALL)
    first, second, third = (checked.admit(length) for length in (30, 20, 33))
    checked.release(first), checked.release(third)
    again = checked.admit(56)  # in the pages of both, not one after another
    locs = checked.cache._pages.locs(again)
    assert (np.diff(locs) != 1).sum() > 1
    for _ in range(6):
        checked.step([again, second])
    checked.check_state()


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_a_row_of_tables_is_as_new_for_its_next_request(device, steps):
    """F35"""
    checked = CheckedCache(20, device, steps, **SMALL)
    long = checked.admit(40)
    for _ in range(steps):
        checked.step([long])
    checked.release(long)
    assert checked.admit(3) == long
    assert checked.cache.slot_tokens(long, 1).tolist() == [0, 1, 2, -1, -1, -1]
    for _ in range(30):  # an LRU order that is left over shows in later misses
        checked.step([long])
    checked.check_state()


def test_a_request_may_be_longer_than_the_device_pool(device):
    sizes = SMALL | {"max_requests": 2, "host_tokens": 300}
    checked = CheckedCache(20, device, **sizes)
    request = checked.admit(250)
    assert 5 * sizes["max_requests"] * (sizes["hot_buffer_size"] + 1) < 250
    for _ in range(5):
        checked.step([request])
    checked.check_state()


@pytest.mark.parametrize(
    ("what", "needed", "available"), [("requests", 1, 0), ("host tokens", 28, 16), ("max_context", 61, 60)]
)
def test_no_room_is_an_error_that_names_what_is_missing(device, what, needed, available):
    checked = CheckedCache(20, device, page_size=4, max_context=60, **SMALL)
    for _ in range(3 if what == "requests" else 2):
        checked.admit(28 if what == "requests" else 40)
    length = {"requests": 1, "host tokens": 25, "max_context": 61}[what]
    with pytest.raises(hisparse.CapacityError, match=what) as raised:
        checked.cache.reserve(length)
    assert (raised.value.what, raised.value.needed, raised.value.available) == (what, needed, available)
    assert isinstance(raised.value, RuntimeError)
    checked.check_state()


def test_a_request_at_max_context_takes_no_further_step():
    checked = CheckedCache(20, "numpy", max_context=12, **SMALL)
    requests = [checked.admit(11), checked.admit(5)]
    checked.step(requests)
    with pytest.raises(hisparse.CapacityError, match="max_context: needed 13, available 12"):
        checked.cache.schedule(requests)
    checked.step(requests[1:])
    checked.check_state()


def test_a_prompt_that_cannot_be_written_leaves_nothing_behind(monkeypatch):
    checked = CheckedCache(20, "numpy", **SMALL)
    write = checked.cache.write

    def fails_at_layer_1(request, layer, *items):
        if layer == 1:
            raise MemoryError("no device memory for the prompt")
        write(request, layer, *items)

    monkeypatch.setattr(checked.cache, "write", fails_at_layer_1)
    with pytest.raises(MemoryError):
        checked.admit(30)
    checked.check_state()


def test_a_full_host_pool_stops_nobody_else(device):
    """Two requests need a page and one is left: neither grows; without one of them the step goes on."""
    checked = CheckedCache(20, device, page_size=4, **SMALL | {"host_tokens": 36})
    requests = [checked.admit(16), checked.admit(16)]
    with pytest.raises(hisparse.CapacityError):
        checked.cache.schedule(requests)
    assert [checked.cache.length(request) for request in requests] == [16, 16]
    checked.step(requests[:1])
    checked.release(requests[1])
    checked.step(requests[:1])
    checked.check_state()


def test_layers_that_replay_another_layer_s_plan(device):
    sizes = SMALL | {"num_layers": 5, "host_tokens": 200}
    for item in (20, "deepseek-v4-c4"):
        checked = CheckedCache(item, device, index_layers=[0, 0, 2, 3, 2], **sizes)
        requests = [checked.admit(length) for length in (5, 60, 7)]
        for n in range(8):
            checked.step(requests[: 1 + n % 3])
            checked.check_state()


def test_statistics_and_time(device):
    checked = CheckedCache(20, device, timing=True, **SMALL)
    request = checked.admit(40)
    assert checked.cache.statistics().hit_rate is None
    for _ in range(4):
        checked.step([request])
    statistics = checked.cache.statistics()
    assert statistics.misses > 0 and statistics.hits == statistics.reads - statistics.misses
    assert statistics.misses == sum(layer.misses for layer in statistics.layers) and len(statistics.layers) == 2
    assert statistics.hit_rate == statistics.hits / statistics.reads
    assert statistics.device_to_host_bytes == 4 * 2 * 20
    assert 0 < statistics.seconds < 60
    assert checked.cache.statistics(wait=False).misses <= statistics.misses
    checked.cache.schedule([request]), checked.cache.advance()  # a step that has not swapped anything in yet
    between = checked.cache.statistics()
    assert (between.reads, between.misses) == (statistics.reads, statistics.misses)
    uncounted = CheckedCache(20, device, statistics=False, **SMALL).cache
    assert uncounted.statistics().seconds is None


def test_presets_have_the_sizes_of_their_models():
    sizes = {name: (preset.item_size_bytes, preset.token_bytes) for name, preset in PRESETS.items()}
    assert sizes == {
        "deepseek-v3.2-fp8": (656, 656),
        "deepseek-v3.2-bf16": (1152, 1152),
        "deepseek-v4-c4": (584, 584),
        "minimax-m3": (256, 512),
    }


@needs_torch
@pytest.mark.parametrize("name", PRESETS)
def test_presets_split_items_into_views(name):
    preset = PRESETS[name]
    items = torch.zeros(3, preset.item_size_bytes, dtype=torch.uint8)
    start = 0
    for field in preset.fields:
        view = preset.split(items)[field.name]
        assert view.dtype == getattr(torch, field.dtype) and view.shape == (3, field.count)
        assert view.data_ptr() == items.data_ptr() + start
        start += view.element_size() * field.count
    assert start == preset.item_size_bytes
    with pytest.raises(ValueError, match="items: expected uint8"):
        preset.split(items[:, 1:])


@needs_torch
@pytest.mark.parametrize("name", PRESETS)
def test_presets_decode(name):
    checked = CheckedCache(
        name, "cpu", num_layers=1, max_requests=2, hot_buffer_size=256, top_k=2, host_tokens=2000, page_size=64
    )
    requests = [checked.admit(250, pieces=2), checked.admit(900, pieces=3)]
    for _ in range(8):
        checked.step(requests)
    checked.check_state()


@needs_torch
def test_items_come_in_any_dtype_and_shape():
    cache = hisparse.HotBufferCache("deepseek-v3.2-bf16", device="cpu", **SMALL)
    prompt = torch.randn(2, 9, 4, 144, dtype=torch.bfloat16, requires_grad=True)
    request = cache.admit(prompt)
    (items,) = cache.read(request, 1)
    assert torch.equal(items.view(torch.bfloat16), prompt[1].detach().reshape(9, 576))
    strided = torch.randn(9, 2, 576, dtype=torch.bfloat16)[:, 1]
    cache.write(request, 0, strided)
    assert torch.equal(cache.read(request, 0)[0].view(torch.bfloat16), strided)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"item": "gpt-2"}, ValueError, "item: expected one of deepseek-v3.2-fp8"),
        ({"item": 0}, ValueError, "item: expected at least 1 byte"),
        ({"item": 1.5}, TypeError, "item: expected an ItemFormat"),
        ({"num_layers": 0}, ValueError, "num_layers: expected at least 1"),
        ({"max_requests": 2.0}, TypeError, "max_requests: expected an int"),
        ({"top_k": 7}, ValueError, "hot_buffer_size: expected at least the 7 tokens"),
        ({"hot_buffer_size": 32769}, ValueError, "hot_buffer_size: expected at most 32768"),
        ({"host_tokens": -1}, ValueError, "host_tokens"),
        ({"page_size": 0}, ValueError, "page_size"),
        ({"max_context": 0}, ValueError, "max_context"),
        ({"max_batch": True}, TypeError, "max_batch"),
        ({"max_requests": 2**29}, ValueError, "max_requests"),
        ({"index_layers": [0]}, ValueError, "index_layers: expected 2 entries"),
        ({"index_layers": [1, 1]}, ValueError, "index_layers: layer 0 cannot use the selection of layer 1"),
        ({"num_layers": 3, "index_layers": [0, 0, 1]}, ValueError, "layer 2 cannot use the selection of layer 1"),
        ({"item": BLOCKS, "index_layers": [0, 0]}, ValueError, "index_layers"),
    ],
)
def test_bad_sizes(change, error, message):
    arguments = {"item": 20, "device": "numpy"} | SMALL | change
    with pytest.raises(error, match=message):
        hisparse.HotBufferCache(arguments.pop("item"), **arguments)


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda cache, r: cache.schedule([r, r]), ValueError, "requests: each may stand there once"),
        (lambda cache, r: cache.schedule([r + 1]), ValueError, "is not admitted"),
        (lambda cache, r: cache.schedule(range(9)), ValueError, "max_batch = 3"),
        (lambda cache, r: cache.release(5), ValueError, "request: 5 is not admitted"),
        (lambda cache, r: cache.reserve(0), ValueError, "length: expected at least 1"),
        (lambda cache, r: cache.write(r, 2, np.zeros((1, 20), np.uint8)), IndexError, "layer: expected 0..1, got 2"),
        (lambda cache, r: cache.write(r, 0, np.zeros((4, 19), np.uint8)), ValueError, "items: expected 20 bytes"),
        (
            lambda cache, r: cache.write(r, 0, np.zeros((4, 20), np.uint8), start=7),
            ValueError,
            "start: 4 tokens from 7",
        ),
        (lambda cache, r: cache.write(r, 0, *np.zeros((2, 4, 20), np.uint8)), TypeError, "items: expected 1 tensors"),
        (lambda cache, r: cache.admit(np.zeros((1, 4, 20), np.uint8)), ValueError, "items: expected 2 layers"),
        (
            lambda cache, r: cache.append(0, np.zeros((4, 20), np.uint8)),
            ValueError,
            "items: expected at most max_batch",
        ),
        (lambda cache, r: cache.swap_in(0), ValueError, "top_k: layer 0 has a selection of its own"),
        (
            lambda cache, r: cache.swap_in(0, np.zeros((4, 3), np.int32)),
            ValueError,
            "top_k: expected at most max_batch",
        ),
        (lambda cache, r: cache.swap_in(0, np.zeros((1, 3), np.int64)), TypeError, "top_k"),
        (lambda cache, r: cache.swap_in(0, np.zeros((1, 2), np.int32)), ValueError, "top_k"),
    ],
)
def test_misuse_is_said_and_changes_nothing(misuse, error, message):
    checked = CheckedCache(20, "numpy", **SMALL)
    request = checked.admit(10)
    with pytest.raises(error, match=message):
        misuse(checked.cache, request)
    checked.check_state()
    checked.step([request])


def test_a_prompt_is_written_before_the_first_step():
    checked = CheckedCache(20, "numpy", **SMALL)
    request = checked.admit(10)
    checked.step([request])
    with pytest.raises(ValueError, match="request: 0 has decoded 1 tokens"):
        checked.cache.write(request, 0, np.zeros((1, 20), np.uint8), start=9)
    checked.check_state()


def test_a_layer_that_follows_needs_its_leader():
    cache = hisparse.HotBufferCache(20, device="numpy", index_layers=[0, 0], **SMALL)
    with pytest.raises(RuntimeError, match="layer 0, whose selection layer 1 uses"):
        cache.swap_in(1)
    with pytest.raises(ValueError, match="top_k: layer 1 uses the selection of layer 0"):
        cache.swap_in(1, np.zeros((1, 3), np.int32))


def test_it_works_without_torch():
    program = """
import sys
sys.modules["torch"] = None
import hisparse
cache = hisparse.HotBufferCache(4, num_layers=1, max_requests=1, hot_buffer_size=2, top_k=1, host_tokens=9)
import numpy as np
request = cache.admit(np.arange(20, dtype=np.uint8).reshape(1, 5, 4))
cache.schedule([request]), cache.advance(), cache.append(0, np.full((1, 4), 99, np.uint8))
assert cache.device_items(0)[cache.swap_in(0, np.array([[3]], np.int32))[0, 0]].tolist() == [12, 13, 14, 15]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_importing_the_package_loads_neither_torch_nor_the_cache():
    program = "import sys, hisparse; assert not {'torch', 'hisparse.hot_buffer_cache'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
