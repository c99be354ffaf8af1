"""`hisparse demo`: passes on a correct op, fails on any of the ways an op can be wrong, and its command line."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest
from places import torch

import hisparse
from hisparse.arrays import NumpyArrays, TorchArrays
from hisparse.cli import main
from hisparse.demo import Settings, decode
from hisparse.text_items import ITEM_WIDTH, KEY_WIDTH, Projection, Words, load_text

STEPS = 32
SMALL = ["demo", "--steps", str(STEPS), "--top-k", "48", "--hot-buffer", "128"]
TIMES = {"seconds", "swap_in_seconds"}


def numbers_of(tmp_path, *options):
    file = tmp_path / "numbers.json"
    assert main([*SMALL, *options, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_demo_passes_and_reports(tmp_path, capsys):
    numbers = numbers_of(tmp_path)
    printed = capsys.readouterr()
    assert "PASS" in printed.out and "FAIL" not in printed.out
    assert printed.err == ""  # no progress bar where nobody watches

    assert numbers["verdict"] == "pass" and numbers["failures"] == []
    assert numbers["settings"] == {"steps": STEPS, "top_k": 48, "hot_buffer": 128, "seed": 0}
    assert numbers["version"] == hisparse.__version__
    assert numbers["item_bytes"] == 4 * ITEM_WIDTH == 1152
    assert numbers["hits"] + numbers["misses"] == numbers["reads"] > 0
    assert numbers["host_to_device_bytes"] == numbers["misses"] * 1152
    assert numbers["host_to_device_bytes_without_hot_buffer"] == numbers["reads"] * 1152
    assert numbers["device_to_host_bytes"] == STEPS * 4 * 1152
    assert numbers["outputs_compared"] == STEPS * 4
    assert 0.5 < numbers["hit_rate"] < 1

    whole, act, outgrows, short = numbers["requests"]
    assert whole["length"] == numbers["words"] > 20_000 and act["length"] > 1_000
    assert outgrows["prompt"] < 128 < outgrows["length"]
    assert short["prompt"] < 48 < short["length"] < 128 and short["reads"] == 0
    assert whole["selected_again"] > whole["reads"] / 2
    assert all(0 < request["attention_weight"] <= STEPS + 0.001 for request in numbers["requests"])


def test_both_warp_sizes_do_the_same(tmp_path):
    wide, narrow = (numbers_of(tmp_path, "--warp-size", width) for width in ("64", "32"))
    assert {k: v for k, v in wide.items() if k not in TIMES} == {k: v for k, v in narrow.items() if k not in TIMES}


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_torch_tensors_do_the_same_as_numpy_arrays():
    with_torch, with_numpy = (
        decode(Settings(12, 48, 128, 0), kind).numbers() for kind in (TorchArrays("cpu"), NumpyArrays())
    )
    assert with_torch["verdict"] == "pass"
    assert {k: v for k, v in with_torch.items() if k not in TIMES} == {
        k: v for k, v in with_numpy.items() if k not in TIMES
    }


@pytest.mark.gpu
def test_demo_on_a_gpu(tmp_path):
    on_gpu, on_cpu = numbers_of(tmp_path, "--device", "cuda"), numbers_of(tmp_path)
    assert on_gpu.pop("device") == "cuda:0" and on_cpu.pop("device") == "cpu"
    assert {k: v for k, v in on_gpu.items() if k not in TIMES} == {k: v for k, v in on_cpu.items() if k not in TIMES}


def flip_a_byte(call):
    slots = call["device_buffer_locs"][call["req_pool_indices"][0], : call["hot_buffer_size"]]
    held = slots[call["device_buffer_tokens"][call["req_pool_indices"][0], : call["hot_buffer_size"]] >= 0]
    call["device_buffer"].view(np.uint8)[held[-1], -1] ^= 1


def swap_two_locs(call):
    call["top_k_device_locs"][0, [0, 1]] = call["top_k_device_locs"][0, [1, 0]]


def name_a_strangers_slot(call):
    call["top_k_device_locs"][0, 0] = call["top_k_device_locs"][1, 0]


def leave_an_entry_out(call):
    call["top_k_device_locs"][0, 0] = -1


def name_a_loc_past_the_pool(call):
    call["top_k_device_locs"][0, 0] = 2**30


def miscount(call):
    call["miss_count"][0] += 1


def claim_a_future_token(call):
    call["device_buffer_tokens"][call["req_pool_indices"][0], 0] = call["seq_lens"][0] + 5


def serve_the_padded_row(call):
    call["top_k_device_locs"][-1] = call["top_k_device_locs"][0]


@pytest.mark.parametrize(
    "fault",
    [
        flip_a_byte,
        swap_two_locs,
        name_a_strangers_slot,
        leave_an_entry_out,
        name_a_loc_past_the_pool,
        miscount,
        claim_a_future_token,
        serve_the_padded_row,
    ],
)
def test_a_faulty_op_is_noticed(monkeypatch, tmp_path, capsys, fault):
    correct, calls = hisparse.load_cache_to_device_buffer_mla, []
    signature = inspect.signature(correct)

    def faulty(*args, **kwargs):
        correct(*args, **kwargs)
        calls.append(signature.bind(*args, **kwargs).arguments)
        if len(calls) == 5:
            fault(calls[-1])

    monkeypatch.setattr(hisparse, "load_cache_to_device_buffer_mla", faulty)
    file = tmp_path / "numbers.json"
    assert main([*SMALL, "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed and "PASS" not in printed and "step 4, " in printed
    assert json.loads(file.read_text())["verdict"] == "fail"


def test_a_copy_that_does_not_happen_is_noticed(monkeypatch):
    correct = hisparse.load_cache_to_device_buffer_mla
    monkeypatch.setattr(
        hisparse, "load_cache_to_device_buffer_mla", lambda *args, **kwargs: correct(*args, **kwargs, skip_io=True)
    )
    assert main(SMALL) == 1


def test_a_lost_backup_is_noticed(monkeypatch):
    monkeypatch.setattr(hisparse.kvcacheio, "transfer_kv_all_layer_mla", lambda *args, **kwargs: None)
    assert main(SMALL) == 1


def test_the_text_is_the_one_its_readme_states():
    text = load_text()
    readme = resources.files("hisparse").joinpath("data/README").read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == re.search(r"SHA-256:\s+(\w+)", readme)[1]
    assert "AS YOU LIKE IT" in text[:30] and f"{len(text):,} bytes" in readme
    assert "public domain" in readme


def test_items_depend_on_text_and_seed_alone():
    words = Words.of("All the world's a stage, and all the men and women merely players. " * 9)
    items = Projection(words, seed=3).items(10, 90)
    assert items.shape == (80, ITEM_WIDTH) and items.dtype == np.float32 and np.isfinite(items).all()
    assert np.array_equal(items, Projection(words, seed=3).items(10, 90))
    assert not np.array_equal(items, Projection(words, seed=4).items(10, 90))
    assert np.array_equal(items[:40], Projection(words, seed=3).items(10, 50))  # causal: later words change nothing


def test_similar_contexts_have_similar_keys():
    words = Words.of(load_text())
    contexts = Projection(words, seed=0).items(0, 8000)[:, : KEY_WIDTH - 32]
    similarity = contexts @ contexts[-1]
    assert similarity[-2] > 0.9
    assert np.median(similarity) < 0.5


def test_help_and_version(capsys):
    for arguments, expected in ((["--help"], "demo"), (["demo", "--help"], "--hot-buffer")):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out
    printed = subprocess.run(
        [sys.executable, "-m", "hisparse", "--version"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == f"hisparse {hisparse.__version__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["demo", "--steps", "0"], "--steps: must be 1..5000, got 0"),
        (["demo", "--top-k", "many"], "--top-k: invalid integer value: 'many'"),
        (["demo", "--top-k", "64", "--hot-buffer", "63"], "--hot-buffer: must be at least --top-k (64), got 63"),
        (["demo", "--hot-buffer", "32769"], "--hot-buffer: must be 1..32768"),
        (["demo", "--warp-size", "48"], "--warp-size"),
        (["demo", "--device", "cuda", "--warp-size", "32"], "--warp-size"),
        (["demo", "--seed", "-1"], "--seed"),
    ],
)
def test_bad_options(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_what_the_op_refuses_is_a_plain_error(capsys):
    with hisparse.cpu.options(shared_memory_bytes=1024), pytest.raises(SystemExit) as stopped:
        main(SMALL)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert "hisparse demo: error:" in printed and "shared memory" in printed and "Traceback" not in printed


def test_bench_says_what_it_needs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as stopped:
        main(["bench"])
    assert stopped.value.code == 2
    assert "the benchmark needs torch" in capsys.readouterr().err
