"""`hisparse verify`: it passes where the ops are right, and finds, names and reports what is not."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from places import has_gpu

import hisparse
from hisparse import cli, verify
from hisparse.arrays import NumpyArrays

SMALL = verify.SwapInSize(5, 8, 3, 24, 3)


@pytest.fixture
def few_checks(monkeypatch):
    monkeypatch.setattr(verify, "copy_sizes", lambda quick: [3, 24])
    monkeypatch.setattr(verify, "swap_in_sizes", lambda quick: [SMALL])


def break_op(monkeypatch, name, damage):
    """After each call of the op, `damage` gets its keyword arguments, or positional ones by number."""
    op = getattr(hisparse, name)

    def broken(*arguments, **named):
        op(*arguments, **named)
        damage(dict(enumerate(arguments)) | named)

    monkeypatch.setattr(hisparse, name, broken)


def test_quick_run_passes_and_says_what_it_did(capsys, tmp_path):
    assert cli.main(["verify", "--device", "cpu", "--quick", "--json", str(tmp_path / "report.json")]) == 0
    text = capsys.readouterr().out
    assert "CPU target, wave 64, wave 32, chunk 32" in text and "PASS" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and report["differences"] == []
    assert report["copy"]["calls"] > 300 and report["swap_in"]["items"] > 10_000


def test_full_run_has_the_sizes_of_the_models():
    items = {size.item_size_bytes for size in verify.swap_in_sizes(quick=False)}
    assert items >= {512, 576, 584, 656, 1024, 1152} and set(verify.copy_sizes(quick=False)) >= items
    assert any(size.num_top_k == 2048 and size.hot_buffer_size == 8192 for size in verify.swap_in_sizes(quick=False))


def damage_a_byte(arguments):
    arguments[1][-1] ^= 1


def swap_two_slots(arguments):
    arguments["lru_slots"][:, :2] = arguments["lru_slots"][:, 1::-1]


def forget_a_miss(arguments):
    arguments["miss_count"][0] += 1


def overrun_the_pool(arguments):
    arguments["device_buffer"][0, 0] ^= 255


def misplace_a_token(arguments):
    arguments["top_k_device_locs"][0, 0] += 1


@pytest.mark.parametrize(
    ("op", "damage", "named"),
    [
        ("copy_items", damage_a_byte, "copy of 3-byte items, host to device"),
        ("load_cache_to_device_buffer_mla", swap_two_slots, "lru_slots"),
        ("load_cache_to_device_buffer_mla", forget_a_miss, "miss_count"),
        ("load_cache_to_device_buffer_mla", overrun_the_pool, "device_buffer"),
        ("load_cache_to_device_buffer_mla", misplace_a_token, "top_k_device_locs"),
    ],
)
def test_a_wrong_result_is_found_and_named(monkeypatch, few_checks, capsys, op, damage, named):
    break_op(monkeypatch, op, damage)
    assert cli.main(["verify", "--device", "cpu", "--quick"]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and named in text and "expected" in text


def test_an_error_of_the_device_is_reported(monkeypatch, few_checks, capsys):
    def failing(*arguments, **named):
        raise RuntimeError("cuLaunchKernel failed with error 700 (illegal address)")

    monkeypatch.setattr(hisparse, "load_cache_to_device_buffer_mla", failing)
    assert cli.main(["verify", "--device", "cpu", "--quick"]) == 1
    assert "RuntimeError: cuLaunchKernel failed with error 700" in capsys.readouterr().out


def test_states_have_hits_misses_duplicates_and_padding():
    decoding = verify.SwapInRun(NumpyArrays(), np.random.default_rng(0), verify.SwapInSize(64, 100, 4, 16, 1))
    tally = verify.Tally()
    top_k = decoding.selection()
    assert (top_k == -1).any() and list(decoding.step(tally)) == []
    assert tally.items > 0 and len(np.unique(top_k[0])) < 64


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "gpu", "must be cpu, cuda or cuda:N"),
        ("--device", "cpu:1", "must be"),
        ("--seed", "-1", "at least 0"),
    ],
)
def test_wrong_options_are_refused(capsys, option, value, message):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify", option, value])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_cpu_target_in_place_of_a_gpu_is_said(monkeypatch, few_checks, capsys, tmp_path):
    if has_gpu():
        pytest.skip("there is one")
    options = ["verify", "--quick", "--json", str(tmp_path / "report.json")]
    reason = "torch, through which GPUs are checked, is not installed"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(options) == 0
    assert f"CPU target, wave 64, wave 32, chunk 32\n          since {reason}\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["fallback"] == reason
    assert cli.main([*options, "--device", "cpu"]) == 0
    assert "since" not in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_said(capsys):
    if has_gpu():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        cli.main(["verify", "--device", "cuda"])
    assert "error: device cuda needs" in capsys.readouterr().err


@pytest.mark.gpu
def test_quick_run_on_a_gpu(capsys):
    assert cli.main(["verify", "--device", "cuda", "--quick"]) == 0
    assert "PASS" in capsys.readouterr().out
