"""hisparse.HotBufferCache on a GPU: steps in one graph, nothing that waits, other streams, realistic sizes."""

from __future__ import annotations

import numpy as np
import pytest
from cache_model import CheckedCache
from places import torch
from test_hot_buffer_cache import ITEMS, SMALL

import hisparse

pytestmark = pytest.mark.gpu


class CapturedStep:
    """advance, append and swap_in of all layers in a graph of `rows` rows, captured before there is any request."""

    def __init__(self, checked: CheckedCache, rows: int):
        cache, self.rows = checked.cache, rows
        self.newest = checked.to_device(checked.random_items(rows))
        self.top_k = torch.full((cache.num_layers, rows, cache.top_k + 2), -1, dtype=torch.int32, device="cuda")
        self.held = []

        def step():
            cache.advance()
            outputs = []
            for layer, leader in enumerate(cache.index_layers):
                cache.append(layer, *self.newest[layer])
                outputs.append(cache.swap_in(layer, self.top_k[layer] if leader == layer else None))
            return outputs

        step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = step()

    def __call__(self, newest: np.ndarray, top_k: np.ndarray):
        used = newest.shape[2]
        self.newest[:, :, :used] = torch.from_numpy(newest).cuda()
        self.top_k[:, :used] = torch.from_numpy(top_k).cuda()
        self.graph.replay()
        return [locs[:used] for locs in self.outputs]


@pytest.mark.parametrize("item", ITEMS)
def test_one_graph_serves_all_lives(rng, item):
    checked = CheckedCache(item, "cuda", page_size=4, max_batch=4, **SMALL | {"host_tokens": 400})
    checked.step_of = CapturedStep(checked, 4)
    requests = [checked.admit(length) for length in (5, 60, 6)]
    for n in range(40):
        checked.step([requests[i] for i in rng.permutation(3)[: rng.integers(0, 4)]], padding=int(rng.integers(0, 2)))
        if n % 10 == 9:
            checked.check_state()
            checked.release(requests[0])
            requests = [*requests[1:], checked.admit(int(rng.integers(1, 40)))]
    checked.check_state()


def test_followers_in_a_graph(rng):
    sizes = SMALL | {"num_layers": 4, "host_tokens": 400}
    checked = CheckedCache(656, "cuda", index_layers=[0, 1, 0, 1], **sizes)
    checked.step_of = CapturedStep(checked, 3)
    requests = [checked.admit(length) for length in (5, 60, 6)]
    for n in range(12):
        checked.step(requests[: 1 + n % 3], padding=0)
    checked.check_state()


@pytest.mark.parametrize("item", ITEMS)
def test_nothing_waits_for_the_gpu(item):
    checked = CheckedCache(item, "cuda", timing=True, **SMALL)
    cache, requests = checked.cache, [checked.admit(length) for length in (5, 30)]
    newest = [checked.to_device(items) for items in checked.random_items(2)]
    top_k = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    for mode in ("default", "error"):  # the first round sets up what is set up once
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for _ in range(3):
                cache.schedule(requests)
                cache.advance()
                for layer in range(cache.num_layers):
                    cache.append(layer, *newest[layer])
                    cache.swap_in(layer, top_k)
                cache.statistics(wait=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    final = cache.statistics()
    cache.statistics(wait=False)
    torch.cuda.synchronize()
    assert cache.statistics(wait=False) == final and final.misses > 0


def test_a_pool_that_is_reused_keeps_the_stream_s_order():
    """The copies of a step are still in the queue when the host pages of its request go to another."""
    sizes = {"num_layers": 1, "max_requests": 1, "hot_buffer_size": 64, "top_k": 64, "host_tokens": 4096}
    cache = hisparse.HotBufferCache(1024, device="cuda", **sizes)
    old, new = (torch.full((1, 4000, 1024), value, dtype=torch.uint8) for value in (7, 9))
    top_k = torch.arange(64, dtype=torch.int32, device="cuda")[None] * 50
    request, newest = cache.admit(old), old[0, :1].cuda()
    torch.cuda._sleep(200_000_000)
    cache.schedule([request])
    cache.advance()
    cache.append(0, newest)
    held = cache.device_items(0)[cache.swap_in(0, top_k)[0].long()]
    cache.release(request)
    cache.admit(new)
    assert (held == 7).all()


def test_all_work_goes_to_the_current_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        checked = CheckedCache(20, "cuda", **SMALL)
        requests = [checked.admit(30), checked.admit(4)]
        checked.step(requests)
        checked.check_state()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.cuda._sleep(4_000_000_000)  # busy for two seconds
        for _ in range(3):
            checked.step(requests)
        checked.check_state()
    assert not torch.cuda.default_stream().query(), "something waited for the default stream"
    torch.cuda.synchronize()


def test_a_cache_may_go_while_the_gpu_still_reads_it():
    sizes = {"num_layers": 1, "max_requests": 1, "hot_buffer_size": 64, "top_k": 64, "host_tokens": 4096}
    cache = hisparse.HotBufferCache(1024, device="cuda", **sizes)
    prompt = torch.randint(0, 256, (1, 4000, 1024), dtype=torch.uint8)
    request = cache.admit(prompt)
    cache.schedule([request])
    cache.advance()
    cache.append(0, prompt[0, :1].cuda())
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    locs = cache.swap_in(0, torch.arange(64, dtype=torch.int32, device="cuda")[None])
    held = cache.device_items(0)[locs[0].long()]
    del cache
    assert torch.equal(held.cpu(), prompt[0, :64])


def test_realistic_sizes():
    sizes = {"num_layers": 2, "max_requests": 3, "hot_buffer_size": 1024, "top_k": 512, "host_tokens": 20_000}
    checked = CheckedCache("deepseek-v3.2-fp8", "cuda", page_size=64, **sizes)
    requests = [checked.admit(length, pieces=2) for length in (9000, 1020, 3000)]
    for _ in range(6):
        checked.step(requests, padding=0)
    checked.check_state()
