"""load_cache_to_device_buffer_mla on a GPU: random calls in bulk, streams, graphs, and launches that overlap."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from places import GpuPlace, assert_same, assert_takes_no_device_memory, torch
from swap_in_cases import SwapInCase, check, expect, make_case, random_entries, random_row, without_stale_plan

import hisparse

pytestmark = pytest.mark.gpu

ITEM_SIZES = (1, 3, 8, 20, 24, 132, 144, 512, 576, 584, 640, 656, 1024, 1028, 1152, 2048)


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_in_bulk(seed):
    rng, place = np.random.default_rng(seed), GpuPlace()
    for item_size_bytes in rng.permutation(np.repeat(ITEM_SIZES, 2)).tolist():
        hot = int(rng.choice([int(rng.integers(1, 200)), int(rng.integers(200, 2500)), 4096]))
        num_top_k = int(rng.integers(1, min(hot, 2048) + 1))
        lengths = hot + rng.integers(-hot // 8, 2 * hot + 2, int(rng.integers(1, 6)))
        hit_rate, noise = rng.random(), rng.choice([0, 0.1, 0.5])
        rows = [random_row(rng, int(n), num_top_k, hot, hit_rate, noise) for n in lengths]
        case = make_case(
            rng,
            rows,
            num_top_k=num_top_k,
            hot_buffer_size=hot,
            item_size_bytes=item_size_bytes,
            page_size=int(rng.choice([1, 64])),
            num_real_reqs=int(rng.integers(0, len(rows) + 1)) if rng.random() < 0.3 else None,
            plan=bool(rng.random() < 0.5),
            index_dtypes=(rng.choice([np.int32, np.int64]), rng.choice([np.int32, np.int64])),
            pool_leads=tuple(rng.choice([0, 0, 4, 8, 1, 13], 2).tolist()),
        )
        check(
            place,
            case,
            block_size=int(rng.choice([256, 512, 960, 1024])),
            blocks_per_request=None if rng.random() < 0.4 else int(rng.integers(1, 9)),
            skip_io=bool(rng.random() < 0.1),
        )


@pytest.mark.parametrize(
    ("batch", "hot_buffer_size", "item_size_bytes", "hit_rate"),
    [(100, 4096, 20, 0.8), (100, 4096, 144, 0.999), (100, 8192, 16, 0.8), (10, 8192, 656, 0.5), (1, 8192, 1152, 0.0)],
)
def test_large_batches(rng, batch, hot_buffer_size, item_size_bytes, hit_rate):
    rows = [random_row(rng, hot_buffer_size + 1000 + b, 2048, hot_buffer_size, hit_rate, 0.01) for b in range(batch)]
    case = make_case(
        rng, rows, num_top_k=2048, hot_buffer_size=hot_buffer_size, item_size_bytes=item_size_bytes, page_size=64
    )
    check(GpuPlace(), case, block_size=1024)


class LiveCase:
    """A case whose arrays stay at one address on the GPU, with new contents for each run of the same launch."""

    def __init__(self, rng, case: SwapInCase):
        self.rng, self.case, self.place = rng, case, GpuPlace()
        self.raws, self.views = {}, {}
        for name, array in case.arrays.items():
            self.raws[name], self.views[name] = self.place.put(name, array)

    def launch(self, **options) -> None:
        hisparse.load_cache_to_device_buffer_mla(**self.views, **self.case.sizes, **options)

    def new_contents(self, *, lengths=None, num_real_reqs=None) -> None:
        case, hot, num_top_k = self.case, self.case.sizes["hot_buffer_size"], self.case.sizes["num_top_k"]
        for b in range(len(case["seq_lens"])):
            if lengths is not None:
                case["seq_lens"][b] = lengths[b]
            length = int(case["seq_lens"][b])
            case["top_k_tokens"][b, :num_top_k] = (
                random_entries(self.rng, case.tokens(b), length, num_top_k, self.rng.random())
                if length > hot
                else self.rng.integers(-1, length + 1, num_top_k)
            )
        if num_real_reqs is not None:
            case["num_real_reqs"][0] = num_real_reqs
        case["top_k_device_locs"][:] = 123_456
        for name, raw in self.raws.items():
            raw.copy_(torch.from_numpy(case.arrays[name].raw))
        torch.cuda.synchronize()

    def take_result(self) -> None:
        """Compares with the reference, and goes on from there."""
        arrays = {name: array.with_raw(self.place.fetch(self.raws[name])) for name, array in self.case.arrays.items()}
        actual = SwapInCase(arrays, self.case.sizes)
        expected = expect(self.case)
        assert_same(without_stale_plan(actual, self.case).arrays, without_stale_plan(expected, self.case).arrays)
        self.case = actual


def live_case(rng, batch=4, num_top_k=64, hot=96, item_size_bytes=656, num_real_reqs=None) -> LiveCase:
    rows = [random_row(rng, 3 * hot, num_top_k, hot) for _ in range(batch)]
    case = make_case(
        rng,
        rows,
        num_top_k=num_top_k,
        hot_buffer_size=hot,
        item_size_bytes=item_size_bytes,
        stale_host_locs=False,
    )
    if num_real_reqs is not None:
        case.arrays["num_real_reqs"] = type(case.arrays["seq_lens"]).of(rng, [num_real_reqs], np.int32)
    return LiveCase(rng, case)


def capture(live: LiveCase, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        live.launch(**options)
    return graph


@pytest.mark.parametrize("blocks_per_request", [None, 1, 4])
def test_a_graph_reads_what_changes_between_replays(rng, blocks_per_request):
    live = live_case(rng, num_real_reqs=4)
    live.launch(blocks_per_request=blocks_per_request)
    graph = capture(live, blocks_per_request=blocks_per_request)
    for num_real_reqs in (4, 2, 0, 3, -1, 9, 1, 4):
        live.new_contents(lengths=rng.integers(1, 3 * 96 + 1, 4), num_real_reqs=num_real_reqs)
        graph.replay()
        live.take_result()


def test_one_graph_holds_many_calls(rng):
    first, second = live_case(rng), live_case(rng, batch=1, num_top_k=96, item_size_bytes=20)
    graph = torch.cuda.CUDAGraph()
    first.launch(), second.launch()
    with torch.cuda.graph(graph):
        first.launch(blocks_per_request=2)
        second.launch(blocks_per_request=8)
    for _ in range(5):
        first.new_contents(), second.new_contents()
        graph.replay()
        first.take_result(), second.take_result()


def test_the_first_call_of_a_process_can_be_captured():
    source = """
import torch, hisparse
src, dst = torch.arange(64, dtype=torch.uint8).view(4, 16).pin_memory(), torch.zeros(4, 16, dtype=torch.uint8).cuda()
locs = torch.arange(4).cuda()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    hisparse.copy_items(src, dst, locs, locs, 16)
assert not dst.any()
graph.replay()
assert (dst.cpu() == src).all()
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=300, cwd=os.path.dirname(__file__))


@pytest.mark.parametrize("blocks_per_request", [1, 8])
def test_launches_on_two_streams_at_the_same_time(rng, blocks_per_request):
    lives = [live_case(rng, batch=2, num_top_k=512, hot=600) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in lives]
    for _ in range(20):
        for live in lives:
            live.new_contents()
        for live, stream in zip(lives, streams, strict=True):
            with torch.cuda.stream(stream):
                live.launch(blocks_per_request=blocks_per_request)
        for live in lives:
            live.take_result()


def test_graphs_captured_alike_replay_at_the_same_time(rng):
    """Counters of blocks that serve one request belong to one launch, not to the stream that it was captured on."""
    lives = [live_case(rng, batch=2, num_top_k=512, hot=600) for _ in range(2)]
    for live in lives:
        live.launch(blocks_per_request=8)
    graphs = [capture(live, blocks_per_request=8) for live in lives]
    streams = [torch.cuda.Stream() for _ in lives]
    for _ in range(20):
        for live in lives:
            live.new_contents()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for live in lives:
            live.take_result()


def test_a_graph_and_a_plain_launch_at_the_same_time(rng):
    captured, plain = (live_case(rng, batch=2, num_top_k=512, hot=600) for _ in range(2))
    captured.launch(blocks_per_request=8)
    graph, stream = capture(captured, blocks_per_request=8), torch.cuda.Stream()
    for _ in range(20):
        captured.new_contents(), plain.new_contents()
        with torch.cuda.stream(stream):
            graph.replay()
        plain.launch(blocks_per_request=8)
        captured.take_result(), plain.take_result()


def test_calls_take_no_device_memory(rng):
    live = live_case(rng)
    live.new_contents()
    assert_takes_no_device_memory(lambda: live.launch(blocks_per_request=4))


def test_a_batch_larger_than_any_before(rng):
    """Counters that were sized for smaller batches."""
    for batch in (1, 3, 100, 700):
        rows = [random_row(rng, 60, 8, 16) for _ in range(batch)]
        check(GpuPlace(), make_case(rng, rows, num_top_k=8, hot_buffer_size=16), blocks_per_request=3)
