"""hisparse.bench on a GPU: in graphs, and with everything that a row has."""

from __future__ import annotations

import pytest
from places import torch

import hisparse
from hisparse.bench import footprint, host_side, kvcacheio, state, swap_in, switches
from hisparse.bench.timing import time_together

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in (state, swap_in):
        monkeypatch.setattr(module, "HOST_ITEMS", 1 << 15)
    monkeypatch.setattr(swap_in, "CEILING_ITEMS", 1 << 13)
    monkeypatch.setattr(kvcacheio, "CEILING_ITEMS", 1 << 13)


def test_rows_of_the_swap_in():
    cases = swap_in.all_cases((4096,), (512, 656), (0.05, 0.0), (1, 8), ("shuffled", "ordered"))
    for row in (row.as_dict() for row in swap_in.measure(cases, peer=hisparse)):
        assert 1 < row["us"] < 1000 and row["peer_us"] > 1
        assert (row["floor_us"] > 0) == (row["miss_rate"] > 0) and row["floor_us"] < row["us"] + row["spread"]
        assert 0 < row["gb_per_s"] < 1.1 * row["ceiling_gb_per_s"] or row["miss_rate"] == 0


def test_rows_of_transfers():
    cases = kvcacheio.all_cases(item_sizes=(656,), items=(256,), quotas=(2,))
    rows = [row.as_dict() for row in kvcacheio.measure(cases, peer=hisparse.kvcacheio)]
    assert len(rows) == 6 and all(row["us"] > 1 and row["peer_us"] > 1 for row in rows)


def test_rows_of_footprints_and_of_the_copy_without_its_parts(monkeypatch):
    monkeypatch.setattr(footprint, "BYTES", 1 << 22)
    rows = list(footprint.measure(megabytes=(16,)))
    assert "pinned" in {row["memory"] for row in rows} and all(row["gb_per_s"] > 0 for row in rows)
    monkeypatch.setattr(switches, "BATCHES", (1,))
    assert all(row["us"] > 0 for row in switches.measure((512,)))


def test_a_graph_keeps_what_its_calls_were_captured_with():
    """Words of 8 bytes take longer where all the copy does is move words."""
    src, dst = (torch.zeros(1 << 26, dtype=torch.uint8, device="cuda") for _ in range(2))
    order = torch.arange(1 << 16, device="cuda")

    def copy(_):
        hisparse.copy_items(src, dst, order, order, 1024, blocks=8)

    def narrow(i):
        with switches.leave_out("wide words"):
            copy(i)

    times = time_together({"shipped": copy, "narrow": narrow}, 2)
    assert times["narrow"].median > 1.2 * times["shipped"].median


def test_host_side_figures(monkeypatch):
    monkeypatch.setattr(host_side, "CALLS", 100)
    monkeypatch.setattr(host_side, "PROCESSES", 1)
    figures = host_side.measure()
    # The device's memory is that of all processes, and other tests run at the same time: it is a figure, not a test.
    assert 0 < figures["call_us"] < 100 and figures["first_result_ms"] > 0 and "device_bytes" in figures
