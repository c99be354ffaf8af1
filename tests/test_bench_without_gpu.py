"""What measures several links, or the swap-in's relatives, takes GPUs: here with the CPU in their place."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from places import torch

if torch is None:
    pytest.skip("needs torch", allow_module_level=True)

from torch.overrides import TorchFunctionMode

from hisparse.bench import family, links, state, timing

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


class OnTheCpu(TorchFunctionMode):
    """What asks for a GPU, or for pinned memory, gets the CPU's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Graph:
    def __init__(self, work):
        work()
        self.replay = work


class Event:
    """Each is 100 us after the one before; `recorded` has the streams of all."""

    recorded: list = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream=None):
        self.recorded.append(stream)
        self.at = len(self.recorded)

    def elapsed_time(self, end):
        assert end.at > self.at
        return (end.at - self.at) * 0.1


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    monkeypatch.setattr(Event, "recorded", [])
    Generator = torch.Generator
    for name, value in {
        "device": lambda index: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda index=0: Stream() if index == 0 else f"stream {index}",
        "synchronize": lambda index=0: None,
        "is_available": lambda: True,
        "get_device_name": lambda index=0: "a GPU",
        "Event": Event,
        "Stream": Stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", lambda device: Generator("cpu"))
    for module in (timing, links):
        monkeypatch.setattr(module, "capture", Graph)
    monkeypatch.setattr(timing, "ROUNDS", (2, 2))
    for module in (links, state, family):
        monkeypatch.setattr(module, "HOST_ITEMS", 1 << 13)
        monkeypatch.setattr(module, "TOP_K", 64)
    monkeypatch.setattr(state, "SEQ_LEN", 1000)
    with OnTheCpu():
        yield


def run_script(monkeypatch, name: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    return stopped.value.code


def test_two_links(cpu_as_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(links, "HOT_BUFFER_SIZE", 128)
    monkeypatch.setattr(links, "BATCH", 2)
    monkeypatch.setattr(links, "MISSES", 8)
    monkeypatch.setattr(links, "AT_ONCE_US", 400)
    assert run_script(monkeypatch, "bench_two_links.py", "--item-sizes", "24,32", "--out", str(tmp_path)) == 0
    rows = json.loads((tmp_path / "links.json").read_text())["rows"]
    assert [(row["work"], row["item_size_bytes"], row["device"]) for row in rows] == [
        (work, size, device) for work in ("gather", "swap-in") for size in (24, 32) for device in (0, 1)
    ]
    for row in rows:
        bytes_per_call = row["item_size_bytes"] * ((1 << 13) // 8 if row["work"] == "gather" else 2 * 8)
        for when in ("alone", "together"):
            assert row[f"{when}_gb_per_s"] * row[f"{when}_us"] == pytest.approx(bytes_per_call / 1e3)
        assert row["kept"] == row["alone_us"] / row["together_us"]
    assert "stream 1" in Event.recorded
    assert (tmp_path / "links.md").read_text() in capsys.readouterr().out


def test_the_relatives(cpu_as_gpu, monkeypatch, tmp_path):
    for name, value in {
        "HOT_BUFFERS": (128, 192),
        "BLOCK_TOKENS": 16,
        "SEQ_LEN": 1000,
        "COPY_BLOCKS": (1, 4),
        "PLANNED_CASES": ((3, 2), (1, 13)),
        "OVERLAP_CASE": (2, 13),
        "PRODUCT_SIZE": 16,
    }.items():
        monkeypatch.setattr(family, name, value)
    (tmp_path / "a_peer_of_the_family.py").write_text("from hisparse import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "family.json"
    where = ["--out", str(out), "--peer", "a_peer_of_the_family"]
    assert run_script(monkeypatch, "bench_family.py", "--quick", *where) == 0
    written = json.loads(out.read_text())
    assert written.pop("device") == "a GPU"
    assert [(row["op"], row["hot_buffer_size"], row["batch"], row["miss_rate"]) for row in written["swap_in"]] == [
        (op, hot, batch, rate)
        for hot in (128, 192)
        for batch in (1, 100)
        for rate in (0.2, 0.0)
        for op in ("dsv4", "blocks")
    ]
    for row in written["swap_in"]:
        assert row.get("floor_blocks") in ((1, 4) if row["miss_rate"] else (None,))
        assert not row["miss_rate"] or row["over_floor_us"] == row["us"] - row["floor_us"]
    assert [(row["batch"], row["misses"]) for row in written["planned"]] == [(3, 2)] * 6 + [(1, 13)] * 6
    assert {row["item"] for row in written["planned"]} == {8, 512, 576, 584, 656, 1152}
    assert all({"us", "peer_us", "floor_us", "over_floor"} <= row.keys() for row in written["planned"])
    assert [(row["num_blocks"], row["block_size"]) for row in written["overlap"]] == [
        (blocks, size) for blocks in (4, 16) for size in (256, 1024)
    ]
    for row in written["overlap"]:
        assert row["slower"] == pytest.approx(row["both_us"] / row["compute_us"] - 1)
