"""The long decode of load.py, made short, and that it finds what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
import reference
from swap_in_cases import make_case, random_row

import hisparse

torch = pytest.importorskip("torch")

import load  # noqa: E402, it needs torch

SMALL = load.Load(
    device="cpu",
    steps=40,
    batch=6,
    top_k=48,
    hot_buffer=64,
    item_bytes=20,
    tokens=300,
    host_items=900,
    verify_every=5,
)
TABLES = ("device_buffer_tokens", "lru_slots", "device_buffer_locs", "host_cache_locs")


@pytest.mark.parametrize("warp_size", [32, 64])
def test_a_short_one_on_the_cpu_target(warp_size):
    with hisparse.cpu.options(warp_size=warp_size, seed=3, strict=True):
        result = load.run(SMALL)
    assert result["differences"] == [] and result["verified_steps"] == 8 and result["steps"] == 40
    assert 0.01 < result["miss_rate"] < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("item_bytes", [512, 656])
def test_a_short_one_on_a_gpu(item_bytes):
    result = load.run(load.Load(steps=600, item_bytes=item_bytes, verify_every=100))
    assert result["differences"] == [] and result["verified_steps"] == 6


@pytest.mark.parametrize(
    ("growth", "alone", "grown"),
    [
        ({"host_resident": 8192}, True, None),
        ({"host_resident": 65 << 20}, False, "host"),
        ({"host_resident": 0, "torch_allocated": 0, "gpu": -(26 << 20)}, True, None),
        ({"host_resident": 0, "torch_allocated": -512, "gpu": 1 << 20}, True, None),
        ({"host_resident": 0, "torch_allocated": 512, "gpu": 0}, False, "device"),
        ({"host_resident": 0, "torch_allocated": 0, "gpu": 2 << 20}, False, None),
        ({"host_resident": 0, "torch_allocated": 0, "gpu": 2 << 20}, True, "device"),
    ],
)
def test_only_memory_that_grew_is_a_difference(growth, alone, grown):
    expected = [f"{grown} memory grew: {growth}"] if grown else []
    assert load.memory_differences(growth, alone) == expected


@pytest.mark.parametrize(
    "name", ["device_buffer", "lru_slots", "device_buffer_tokens", "top_k_device_locs", "miss_dst"]
)
def test_a_wrong_value_is_found(monkeypatch, name):
    right, calls = hisparse.load_cache_to_device_buffer_mla, []

    def wrong(**arguments):
        right(**arguments)
        calls.append(1)
        if len(calls) == 16:
            array = arguments[name].view(-1)[0:1] if name == "device_buffer" else arguments[name][2, :1]
            array += 1

    monkeypatch.setattr(hisparse, "load_cache_to_device_buffer_mla", wrong)
    differences = load.run(SMALL)["differences"]
    assert differences and all(difference.startswith("step 15: ") for difference in differences)
    assert any(name in difference for difference in differences)


def test_the_command_prints_json(capsys):
    arguments = [
        "--device",
        "cpu",
        "--steps",
        "3",
        "--batch",
        "3",
        "--top-k",
        "4",
        "--hot-buffer",
        "5",
        "--tokens",
        "20",
    ]
    assert load.main([*arguments, "--host-items", "30", "--verify-every", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["verified_steps"] == 3


@pytest.mark.parametrize("seed", range(12))
def test_its_reference_is_the_contract(seed):
    """Against the reference that goes through a row entry by entry."""
    rng = np.random.default_rng(seed)
    hot, batch = int(rng.integers(1, 60)), int(rng.integers(1, 6))
    num_top_k = int(rng.integers(1, hot + 1))
    rows = [random_row(rng, hot + int(rng.integers(-hot // 2, 90)), num_top_k, hot, rng.random()) for _ in range(batch)]
    case = make_case(
        rng,
        rows,
        num_top_k=num_top_k,
        hot_buffer_size=hot,
        num_real_reqs=int(rng.integers(1, batch + 1)),
        stale_host_locs=False,
        spare_requests=batch,
    )
    real = reference.real_rows(batch, case["num_real_reqs"])
    rids = np.full(batch, case["req_pool_indices"][0], np.int64)  # padding names nothing: any row will do
    rids[:real] = case["req_pool_indices"][:real]
    tensors = {name: torch.from_numpy(np.ascontiguousarray(case[name][rids])) for name in TABLES}
    lengths = np.zeros(batch, np.int64)
    lengths[:real] = case["seq_lens"][:real]
    found = load.expected_step(
        torch.from_numpy(case["top_k_tokens"][:, :num_top_k].copy()),
        tensors["device_buffer_tokens"][:, :hot],
        tensors["lru_slots"][:, :hot],
        tensors["device_buffer_locs"][:, : hot + 1],
        tensors["host_cache_locs"],
        torch.from_numpy(lengths),
        real,
    )
    expected = case.copy()
    reference.load_cache_to_device_buffer_mla(**expected.views(), **expected.sizes)
    assert np.array_equal(found["top_k_device_locs"].numpy(), expected["top_k_device_locs"][:, :num_top_k])
    for b in range(real):
        count = expected.misses(b)
        assert found["miss_count"][b] == count
        for name, width in (("device_buffer_tokens", hot), ("lru_slots", hot)):
            assert np.array_equal(found[name][b].numpy(), expected[name][rids[b], :width]), name
        for name in ("miss_src", "miss_dst"):
            assert np.array_equal(found[name][b, :count].numpy(), expected[name][b, :count]), name
