"""hisparse.trace: what it records is what was selected, and its replay counts what the op does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference
from cache_model import CheckedCache
from hypothesis import given, settings
from hypothesis import strategies as st
from places import has_gpu

import hisparse
from hisparse import trace
from hisparse.cli import main
from hisparse.trace import Link, Replay, Trace
from hisparse.trace.replay import HotBuffer

SIZES = {"num_layers": 2, "max_requests": 3, "hot_buffer_size": 8, "top_k": 4, "host_tokens": 200}


def op_misses(selections: list[list[int]], lengths: list[int], hot: int) -> list[int]:
    """Misses of each step by the reference of the op, for one request that was prefilled before the first step."""
    longest, width = max(lengths), len(selections[0])
    tokens, lru = np.full((1, hot + 1), -1, np.int32), np.arange(hot, dtype=np.int16)[None]
    if lengths[0] - 1 <= hot:
        tokens[0, : lengths[0] - 1] = np.arange(lengths[0] - 1)
    locs, host_locs = np.arange(hot + 1, dtype=np.int32)[None], np.arange(longest)[None]
    host, device, out = (
        np.zeros((longest, 1), np.uint8),
        np.zeros((hot + 1, 1), np.uint8),
        np.zeros((1, width), np.int32),
    )
    plan = np.zeros((1, width), np.int64), np.zeros((1, width), np.int32), np.zeros(1, np.int32)
    misses = []
    for selection, length in zip(selections, lengths, strict=True):
        if length <= hot:
            tokens[0, length - 1] = length - 1
        reference.load_cache_to_device_buffer_mla(
            np.array([selection], np.int32), tokens, host_locs, locs, host, device, out, np.array([0]),
            np.array([length]), lru, 1, width, hot, miss_src=plan[0], miss_dst=plan[1], miss_count=plan[2],
        )  # fmt: skip
        misses.append(int(plan[2][0]))
    return misses


@st.composite
def runs(draw):
    width, steps, prompt = draw(st.integers(1, 6)), draw(st.integers(1, 25)), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = [prompt + 1 + n for n in range(steps)]
    spread = draw(st.sampled_from([3, 10, 40]))
    selections = [(length - 1 - rng.integers(-1, spread, width)).clip(-1).tolist() for length in lengths]
    return selections, lengths, width + draw(st.integers(0, 10))


@settings(max_examples=150, deadline=None)
@given(runs())
def test_replay_counts_the_misses_of_the_op(run):
    selections, lengths, hot = run
    recorded = Trace(np.array(selections, np.int32)[:, None, None], np.array(lengths, np.int32)[:, None])
    (result,) = trace.replay(recorded, [hot])
    assert result.misses[:, 0].tolist() == op_misses(selections, lengths, hot)
    valid = [sum(0 <= token < length for token in tokens) for tokens, length in zip(selections, lengths, strict=True)]
    assert result.reads[:, 0].tolist() == valid


def decode(checked: CheckedCache) -> list[int]:
    """30 steps, in which requests come and go, and one takes the row of an earlier one."""
    requests = [checked.admit(length) for length in (5, 40, 7)]
    for n in range(30):
        checked.step(requests[: 1 + n % 3])
        if n == 15:
            checked.release(requests[0])
            requests[0] = checked.admit(20)
    return requests


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_recorded_run_replays_to_its_own_statistics(tmp_path, page_size):
    checked = CheckedCache(20, "numpy", page_size=page_size, **SIZES)
    with trace.recording(tmp_path / "run.npz", source="a test"):
        requests = decode(checked)
    reads, misses = checked.reads, checked.misses
    checked.step(requests)  # not recorded
    recorded = trace.load(tmp_path / "run.npz")
    assert recorded.source == "a test" and recorded.layers.tolist() == [0, 1]
    assert recorded.top_k.shape == (30, 2, 3, 4) and len(np.unique(recorded.requests)) == 1 + 4
    small, same, large = trace.replay(recorded, [4, 8, 64])
    assert (same.reads.sum(), same.misses.sum()) == (reads, misses)
    assert small.misses.sum() > misses > large.misses.sum()


def test_recording_of_blocks_and_of_a_run_without_a_cache(tmp_path):
    with trace.recording(tmp_path / "blocks.npz") as recorder:
        for step in range(3):
            recorder.add(7, np.array([[0, 3], [1, -1]]), [20 + step, 9], requests=[5, 6], block_tokens=4)
            recorder.add(2, np.array([[2]]), [20 + step], block_tokens=4)
    recorded = trace.load(tmp_path / "blocks.npz")
    assert recorded.layers.tolist() == [2, 7] and recorded.block_tokens == 4 and recorded.selected_tokens == 8
    assert recorded.top_k[0].tolist() == [[[2, -1], [-1, -1]], [[0, 3], [1, -1]]]
    (result,) = trace.replay(recorded, [8])
    # Layer 7: 8 tokens of one request, and 4 of another whose prompt of 8 tokens lay in its hot buffer.
    assert result.reads.tolist() == [[4, 12]] * 3 and result.misses.tolist() == [[4, 8], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match="1 rows of top_k, 2 of seq_lens"):
        recorder.add(0, np.array([[0]]), [3, 4])


def test_a_trace_is_written_after_an_exception(tmp_path):
    with pytest.raises(KeyError), trace.recording(tmp_path / "run.npz") as recorder:
        recorder.add(0, np.array([[1, 2]]), [9])
        raise KeyError
    assert trace.load(tmp_path / "run.npz").top_k.tolist() == [[[[1, 2]]]]


@settings(max_examples=150, deadline=None)
@given(runs(), st.integers(1, 5))
def test_a_larger_hot_buffer_holds_what_a_smaller_one_does(run, more):
    """So more slots never miss more, although the LRU orders of two sizes differ."""
    selections, lengths, hot = run
    small, large = (HotBuffer(size, None, max(lengths) + 1) for size in (hot, hot + more))
    for selection in np.array(selections, np.int32):
        assert small.step(selection, None)[1] >= large.step(selection, None)[1]
        assert set(small._token_of.tolist()) <= set(large._token_of.tolist()) | {-1}


@pytest.mark.parametrize("largest", [2**15 - 1, 2**15, 10**6])
def test_files_hold_every_position(tmp_path, largest):
    rng = np.random.default_rng(largest)
    top_k = rng.integers(-1, largest + 1, (5, 2, 3, 4), dtype=np.int32)
    top_k[0, 0, 0, :2] = -1, largest
    Trace(top_k, source="all \u00fcber the place").save(tmp_path / "a trace")
    loaded = trace.load(tmp_path / "a trace")
    assert loaded.top_k.dtype == np.int32 and np.array_equal(loaded.top_k, top_k)
    assert loaded.seq_lens is None and loaded.requests is None and loaded.source == "all \u00fcber the place"


@pytest.mark.parametrize("shape", [(6, 2, 3), (6, 1, 2, 3)])
def test_dumps(tmp_path, shape):
    rng = np.random.default_rng(1)
    dump = rng.integers(0, 30, shape, dtype=np.int32)
    np.save(tmp_path / "dump.npy", dump)
    unknown, known = trace.load(tmp_path / "dump.npy"), trace.load(tmp_path / "dump.npy", prompt=30)
    assert unknown.seq_lens is None and known.seq_lens.tolist() == [[31 + n] * 2 for n in range(6)]
    assert np.array_equal(unknown.top_k, dump.reshape(6, 1, 2, 3))
    (without,), (with_lengths,) = trace.replay(unknown, [8]), trace.replay(known, [8])
    # No position is the newest, so that both mean the same; a hot buffer of 32 holds the prompt from the start.
    assert np.array_equal(without.misses, with_lengths.misses) and without.misses[0, 0] > 0
    assert trace.replay(unknown, [31])[0].misses.sum() > 0 == trace.replay(known, [31])[0].misses.sum()


@pytest.mark.parametrize(
    ("content", "prompt", "message"),
    [
        (np.zeros((2, 3), np.int32), None, "top_k: expected integers"),
        (np.zeros((2, 3, 4), np.float32), None, "top_k: expected integers"),
        ({"seq_lens": np.zeros((2, 3), np.int32)}, None, "expected a trace, with an array top_k"),
        ({"top_k": np.zeros((2, 1, 3, 4), np.int32), "seq_lens": np.zeros(2, np.int32)}, None, "seq_lens: expected"),
        ({"top_k": np.zeros((2, 1, 3, 4), np.int32)}, 9, "has its own lengths"),
        ({"top_k": np.zeros((2, 1, 3, 4), np.int32), "block_tokens": 0}, None, "block_tokens"),
    ],
)
def test_files_that_are_no_traces(tmp_path, content, prompt, message):
    path = tmp_path / "file"
    with open(path, "wb") as file:
        np.savez(file, **content) if isinstance(content, dict) else np.save(file, content)
    with pytest.raises(ValueError, match=message):
        trace.load(path, prompt)


def test_too_small_a_hot_buffer():
    with pytest.raises(ValueError, match="at least the 8 tokens of a selection, got 7"):
        trace.replay(Trace(np.zeros((1, 1, 1, 4), np.int32), block_tokens=2), [8, 7])


def test_time_on_a_link():
    link = Link(bytes_per_second=1e9, overhead_seconds=5e-6)
    assert link.step_seconds(np.array([[0, 0], [10, 30]]), 500).tolist() == pytest.approx([10e-6, 30e-6])
    result = Replay(8, np.full((3, 1), 10), np.array([[10], [2], [0]]))
    assert result.hit_rate == pytest.approx(0.6) and result.without_first(1).hit_rate == pytest.approx(0.9)
    assert Replay(8, np.zeros((0, 1), int), np.zeros((0, 1), int)).hit_rate is None


def test_the_model_predicts_what_was_measured():
    """docs/performance.md, H200, H = 4096, 512 B: us of a call with 20 % and 5 % of B * 2048 entries missing."""
    link = Link(51e9, 7.2e-6)
    for batch, rate, measured in (
        (1, 0.2, 11.4),
        (4, 0.2, 23.6),
        (24, 0.05, 31.4),
        (24, 0.2, 105.7),
        (100, 0.2, 419.0),
    ):
        misses = np.array([[round(batch * 2048 * rate)]])
        assert link.step_seconds(misses, 512)[0] * 1e6 == pytest.approx(measured, rel=0.02)


def test_the_shipped_trace_is_a_model_s():
    recorded = trace.shipped()
    assert "Gemma 3 270M" in recorded.source and recorded.layers.tolist() == [5, 11, 17]
    steps, _, _, width = recorded.top_k.shape
    assert (steps, width) == (256, 128) and recorded.seq_lens[:, 0].tolist() == list(range(6001, 6257))
    assert (recorded.top_k < recorded.seq_lens[:, None, :, None]).all() and (np.diff(recorded.top_k) > 0).all()
    small, large = trace.replay(recorded, [128, 2048])
    assert 0.3 < small.hit_rate < 0.6 < 0.8 < large.hit_rate < 0.95


def numbers_of(tmp_path, *options):
    assert main(["trace", "replay", *map(str, options), "--json", str(tmp_path / "numbers.json")]) == 0
    return json.loads((tmp_path / "numbers.json").read_text())


def test_replay_from_the_command_line(tmp_path, capsys):
    numbers = numbers_of(tmp_path, "--hot-buffers", "128,512", "--item", "1000", "--link-gb-per-s", "10")
    printed = capsys.readouterr().out
    assert "Gemma 3 270M" in printed and "| 512 |" in printed and "10.0 GB/s" in printed
    nothing, small, large = numbers["rows"]
    assert [row["hot_buffer_size"] for row in numbers["rows"]] == [0, 128, 512]
    results = trace.replay(trace.shipped(), [128, 512])
    assert nothing["misses_mean"] == 3 * 128 and nothing["hit_rate_percent"] == 0
    for row, result in zip((small, large), results, strict=True):
        assert row["hit_rate_percent"] == pytest.approx(100 * result.hit_rate)
        assert row["misses_mean"] == pytest.approx(result.misses.sum() / 256)
        assert row["us_mean"] == pytest.approx(3 * 7.2 + row["misses_mean"] * 1000 / 10e9 * 1e6)
        assert row["device_mb_per_request"] == (row["hot_buffer_size"] + 1) * 3000 / 1e6
    assert numbers["misses_per_step"]["512"] == results[1].misses.sum(axis=1).tolist()
    later = numbers_of(tmp_path, "--hot-buffers", "128", "--skip-steps", "1")["rows"][1]
    assert later["misses_max"] < small["misses_max"]


def test_a_reader_that_has_seen_enough_is_no_error():
    """As in `hisparse trace replay | head -1`: the pipe has no reader left, at the first write or at the last."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hisparse", "trace", "replay", "--hot-buffers", "128"]
    for unbuffered in ("", "1"):
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": unbuffered,
            "PYTHONPATH": str(Path(hisparse.__file__).parents[1]),
        }
        result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
        assert (result.returncode, result.stderr) == (141, "")
    os.close(writing)


def test_record_from_the_command_line_and_replay_it(tmp_path, capsys):
    path, text = tmp_path / "trace.npz", tmp_path / "text.txt"
    text.write_text("The rain in Spain stays mainly in the plain, said she; by George, he said, she's got it. " * 40)
    arguments = ["trace", "record", str(path), "--text", str(text), "--steps", "20", "--top-k", "24"]
    assert main(arguments) == 0
    assert "20 steps, 4 requests" in capsys.readouterr().out
    recorded = trace.load(path)
    assert recorded.top_k.shape == (20, 1, 4, 24) and "text.txt" in recorded.source
    rows = numbers_of(tmp_path, path, "--item", "deepseek-v4-c4")["rows"]
    assert [row["hot_buffer_size"] for row in rows][:3] == [0, 24, 36]
    hits = [row["hit_rate_percent"] for row in rows]
    assert hits[0] == 0 < hits[1] < hits[-1] <= 100


def test_the_plot_shows_every_size(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    image = tmp_path / "plot.png"
    numbers_of(tmp_path, "--hot-buffers", "128,256", "--plot", image)
    assert pyplot.imread(image).shape[0] > 300
    drawing = tmp_path / "plot.svg"
    numbers_of(tmp_path, "--hot-buffers", "128,256", "--plot", drawing)
    assert drawing.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace"], "ACTION"),
        (["trace", "replay", "nowhere.npz"], "nowhere.npz"),
        (["trace", "replay", "--hot-buffers", "64"], "at least the 128 tokens of a selection, got 64"),
        (["trace", "replay", "--hot-buffers", "0"], "must be 1..32768, got 0"),
        (["trace", "replay", "--item", "gpt-2"], "argument --item: invalid"),
        (["trace", "replay", "--link-gb-per-s", "0"], "must be above 0, got 0"),
        (["trace", "replay", "--skip-steps", "256"], "the trace has 256 steps, got 256"),
        (["trace", "record", "x.npz", "--top-k", "0"], "must be 1..16383, got 0"),
        (["trace", "record", "x.npz", "--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_arguments(capsys, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(has_gpu(), reason="there is one")
def test_measuring_a_link_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        main(["trace", "replay", "--hot-buffers", "128", "--link-gb-per-s", "measure"])
    assert "measuring the link needs" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_link_of_this_machine(tmp_path):
    numbers = numbers_of(tmp_path, "--hot-buffers", "128", "--link-gb-per-s", "measure")
    assert 1 < numbers["link_gb_per_s"] < 1000


@pytest.mark.gpu
def test_recording_on_a_gpu_and_not_in_a_graph(tmp_path):
    import torch

    checked = CheckedCache(20, "cuda", **SIZES)
    with trace.recording(tmp_path / "run.npz"):
        request = checked.admit(30)
        for _ in range(3):
            checked.step([request])
        top_k = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
        with pytest.raises(RuntimeError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            checked.cache.swap_in(0, top_k)
    recorded = trace.load(tmp_path / "run.npz")
    assert recorded.top_k.shape == (3, 2, 1, 4)
    assert trace.replay(recorded, [8])[0].misses.sum() == checked.misses
    assert hisparse.trace is trace
