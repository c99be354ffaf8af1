"""hisparse.bench: the whole way on the CPU target, and what the reports say about rows that are made up."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
from places import has_gpu, torch

import hisparse
from hisparse.cli import main

if torch is None:
    pytest.skip("needs torch", allow_module_level=True)

from hisparse.bench import command, footprint, kvcacheio, report, state, swap_in, targets, timing
from hisparse.bench.timing import Time

pytestmark = pytest.mark.skipif(has_gpu(), reason="the benchmark would take the GPU")

PEER = """
import hisparse
from hisparse.kvcacheio import *
calls = []
def load_cache_to_device_buffer_mla(*args, **options):
    calls.append(options.get("block_size"))
    hisparse.load_cache_to_device_buffer_mla(*args, **options)
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """A few rounds, and a state of a few kilobytes."""
    monkeypatch.setattr(timing, "ROUNDS", (1, 2))
    monkeypatch.setattr(state, "VARIANTS", 2)
    for module in (state, swap_in):
        monkeypatch.setattr(module, "HOST_ITEMS", 1 << 13)
        monkeypatch.setattr(module, "TOP_K", 64)
    monkeypatch.setattr(state, "SEQ_LEN", 1000)
    monkeypatch.setattr(swap_in, "VARIANTS", 2)
    monkeypatch.setattr(swap_in, "CEILING_ITEMS", 256)
    for module, name, value in (
        (command.host_side, "CALLS", 5),
        (command.host_side, "PROCESSES", 1),
        (command.host_side, "HOT_BUFFER", 128),
        (command.switches, "HOT_BUFFER", 128),
        (command.switches, "VARIANTS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(kvcacheio, "CEILING_ITEMS", 256)
    monkeypatch.setattr(kvcacheio, "CEILING_BLOCKS", (1,))


def test_the_command_measures_the_cpu_target(tmp_path, capsys):
    peer = tmp_path / "other_swap_in.py"
    peer.write_text(PEER)
    sizes = ["--hot-buffers", "128", "--item-sizes", "24,32", "--miss-rates", "0.25,0", "--batches", "1,2"]
    where = ["--out", str(tmp_path / "out"), "--markdown", str(tmp_path / "deep" / "read.md")]
    assert main(["bench", *sizes, "--states", "shuffled,ordered", "--switches", "--peer", str(peer), *where]) == 0
    assert set(sys.modules.pop("other_swap_in").calls) == {1024}

    written = json.loads((tmp_path / "out" / "swap_in.json").read_text())
    assert written["machine"]["hisparse"] == hisparse.__version__
    rows = written["rows"]
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        assert row["us"] and row["peer_us"] and row["one_block_us"] and row["ceiling_gb_per_s"] > 0
        assert bool(row["floor_us"]) == (row["miss_rate"] > 0)
    variants = [row["variant"] for row in written["switches"] if row["what"] == "copy_items"]
    assert set(variants) == {"shipped", "no wide words", "no load hint", "no gate"}
    assert written["host_side"]["device_bytes"] == 0 < written["host_side"]["call_us"]
    printed = capsys.readouterr().out
    assert "a keyword call" in printed and "Targets" not in printed
    assert "| 128 | 24 |" in (tmp_path / "deep" / "read.md").read_text()
    assert (tmp_path / "out" / "swap_in.md").read_text().count("\n") == 2 + len(rows)
    has_plots = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "out" / "swap_in.png").exists() == has_plots


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--states", "shuffled,sorted"], "--states: sorted is none of shuffled, ordered"),
        (["--peer", "/nowhere/peer.py"], "--peer: no module at /nowhere/peer.py"),
        (["--peer", "no_such_module"], "--peer: No module named 'no_such_module'"),
    ],
)
def test_bad_arguments_stop_it_before_anything_is_measured(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_limit_is_said(capsys):
    sizes = ["--hot-buffers", "128", "--item-sizes", "24", "--miss-rates", "0.25", "--batches", "1,2"]
    assert main(["bench", *sizes, "--limit-s", "0"]) == 0
    assert "2 rows were not measured" in capsys.readouterr().out


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_state_misses_what_it_says(ordered, sequential):
    made = state.State(128, 16, 3, ordered, sequential)
    host = torch.randint(0, 256, (state.HOST_ITEMS, 8), dtype=torch.uint8)
    device = torch.zeros(made.device_items, 8, dtype=torch.uint8)
    sources = []
    for variant, (src, dst) in enumerate(made.plans(host, device, 8)):
        device.zero_()
        made.reset()
        hisparse.load_cache_to_device_buffer_mla(**made.arguments(variant, host, device, 8))
        assert len(src) == 3 * 16 == len(dst.unique())
        assert torch.equal(device[dst], host[src]) and int(device.any(1).sum()) <= len(dst)
        top_k, tokens = made.top_k[variant].long(), made.tokens[:, :128].long()
        slots = (tokens[:, None] == top_k[..., None]).int().argmax(2)
        assert torch.equal(made.out.long(), made.locs[:, :128].long().gather(1, slots))
        sources.append(src)
    if ordered or not sequential:
        assert len(torch.cat(sources).unique()) == 2 * 3 * 16
    steps = sources[0].view(3, 16).diff()
    assert bool((steps == 1).all()) == (ordered and sequential)


def swap_in_row(us, floor, **case):
    wanted = {"state": "shuffled", "host_order": "random", "hot_buffer_size": 4096, "batch": 4, "miss_rate": 0.2}
    case = swap_in.Case(**wanted | {"item_size_bytes": 512} | case)
    times = {"ours": Time(us, 0.1), "one block": Time(us, 0.1), "peer": Time(us - 0.25, 0.1), "floor": Time(floor, 0)}
    return swap_in.Row(case, times, 4, 51.0).as_dict()


def verdict_of(verdicts, start):
    return next(verdict for verdict in verdicts if verdict.sentence.startswith(start))


def test_verdicts_name_the_worst_row():
    rows = [swap_in_row(10.0, 5.5), swap_in_row(12.0, 6.5, batch=24), swap_in_row(9.0, 5.0, batch=1)]
    verdicts = targets.swap_in_verdicts(rows)
    over = verdict_of(verdicts, "H=4096, B <= 24")
    assert (over.rows, over.missed) == (3, 1) and "5.5 us at H=4096 B=24" in over.worst
    assert str(over).startswith("NOT MET") and "aim 4.0 us not reached" in str(over)
    assert verdict_of(verdicts, "never slower than one block").missed == 0
    assert verdict_of(verdicts, "never slower than the peer").missed == 3  # by more than the spreads
    assert str(verdict_of(verdicts, "H=8192, B <= 24")).startswith("not measured")
    other = targets.swap_in_verdicts([swap_in_row(9.0, 5.2, state="ordered")])
    assert verdict_of(other, "H=4096, B <= 24: at most floor + 5.0 us, other").rows == 1
    assert "aim reached" in str(verdict_of(other, "H=4096, B <= 24: at most floor + 5.0 us, other"))
    copied = 100 * round(swap_in.TOP_K * 0.2) * 512
    full = swap_in_row(copied / 51.0 / 1e3 / 0.98, 1.0, batch=100)
    assert verdict_of(targets.swap_in_verdicts([full]), "H=4096, B=100, 20 %").missed == 0


def transfer_row(rate, peer_rate=None, **case):
    wanted = {"op": "per layer", "direction": "h2d", "item_size_bytes": 512, "items": 65536, "block_quota": 2}
    case = kvcacheio.Case(**wanted | case)
    size = case.items * case.item_size_bytes / 1e3
    peer = Time(size / peer_rate, 0) if peer_rate else None
    return kvcacheio.Row(case, Time(size / rate, 0), 51.0, peer).as_dict()


def test_verdicts_of_transfers():
    rows = [
        transfer_row(39.0),
        transfer_row(50.0, block_quota=4),
        transfer_row(49.0, direction="d2h"),
        transfer_row(38.0, op="all layers"),
        transfer_row(36.0, op="page first"),
        transfer_row(20.0, 21.0, items=256),
        transfer_row(20.0, 19.0, items=256, block_quota=4),
    ]
    missed = {verdict.sentence: (verdict.missed, verdict.rows) for verdict in targets.kvcacheio_verdicts(rows)}
    assert missed == {
        "host to device at quota 2: at least 40 GB/s": (1, 1),
        "host to device from quota 4: at least 98 % of the ceiling": (0, 1),
        "device to host at quota 2: at least 48 GB/s": (0, 1),
        "256 items: no slower than the peer": (1, 2),
        "65,536 items: no slower than the peer": (0, 0),
        "all layers: within 5 % of the per-layer rate": (0, 1),
        "page first: within 5 % of the per-layer rate": (1, 1),
    }


def test_transfers_are_measured_on_the_cpu_target():
    cases = kvcacheio.all_cases(item_sizes=(24,), items=(64,), quotas=(2,))
    rows = [row.as_dict() for row in kvcacheio.measure(cases, peer=hisparse.kvcacheio)]
    assert len(rows) == 6 and all(row["us"] > 0 and row["peer_us"] > 0 for row in rows)
    assert "| page first | d2h | 24 |" in "\n".join(report.kvcacheio_sections(rows))


def test_footprints_are_measured_on_the_cpu_target(monkeypatch):
    monkeypatch.setattr(footprint, "BYTES", 1 << 14)
    rows = list(footprint.measure(megabytes=(1,)))
    assert len(rows) == len(footprint.MEMORIES) * len(footprint.ITEM_SIZES) * 2 * len(footprint.QUOTAS)
    assert all(row["gb_per_s"] > 0 for row in rows)
    assert "MiB 1 |" in report.footprint_section(rows)


def test_a_peer_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "some_peer", types.ModuleType("some_peer"))
    assert command.load_peer("some_peer") is sys.modules["some_peer"]
    (tmp_path / "beside.py").write_text("answer = 42\n")
    (tmp_path / "with_neighbour.py").write_text("from beside import answer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert command.load_peer(str(Path(tmp_path) / "with_neighbour.py")).answer == 42


def test_a_column_has_numbers_of_one_form():
    rows = [{"a": 0.0371, "b": 11, "c": None, "d": 0.5}, {"a": 178.04, "b": 2, "c": None, "d": 1.25}]
    lines = report.table(rows, {"a": "A", "b": "B", "c": "C", "d": "D"}).splitlines()
    assert lines == ["| A | B | D |", "|---:|---:|---:|", "| 0.0 | 11 | 0.500 |", "| 178.0 | 2 | 1.250 |"]
    assert [report.counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
