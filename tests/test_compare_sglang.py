"""benchmarks/compare_sglang.py: it finds peers equal that are, and each way in which one is not."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch")
from hisparse import kvcacheio  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "compare_sglang.py"
SMALL = [
    "--device=cpu", "--top-k=16", "--hot-buffer=64", "--block-tokens=4", "--requests=3", "--steps=5", "--item-sizes=24"
]  # fmt: skip
SWAP_IN = "load_cache_to_device_buffer_mla"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_sglang", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_sglang"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compare_sglang"]


@pytest.fixture
def peer(monkeypatch):
    module = ModuleType("a_peer")
    monkeypatch.setitem(sys.modules, "a_peer", module)
    return module


def swap_in_reference(**arguments):
    arguments.pop("block_size")
    arrays = {name: value.numpy() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    reference.load_cache_to_device_buffer_mla(**{**arguments, **arrays})


def test_the_reference_is_equal(script, peer, capsys):
    setattr(peer, SWAP_IN, swap_in_reference)
    assert script.main(["--peer", "a_peer", *SMALL]) == 0
    assert f"{SWAP_IN}, 24 B: equal over 5 steps\n1 comparisons, 0 differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("top_k_device_locs", (0, 3)),
        ("device_buffer_tokens", (2, 5)),
        ("lru_slots", (1, 0)),
        ("device_buffer", (7, 23)),
        ("miss_count", (0,)),
        ("miss_src", (0, 0)),
    ],
)
def test_one_element_off(script, peer, capsys, written, place):
    def almost(**arguments):
        swap_in_reference(**arguments)
        if written in arguments and arguments["num_real_reqs"][0] > 0:
            if written == "miss_src":  # an entry of the plan
                place_of_a_miss = (arguments["miss_count"] > 0).nonzero()[:1]
                arguments["miss_src"][place_of_a_miss, 0] += 1
            else:
                arguments[written][place] ^= 1

    setattr(peer, SWAP_IN, almost)
    assert script.main(["--peer", "a_peer", *SMALL]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"DIFFERS, step \d: {written}(\[0\])?: 1 elements differ, the first at ", out)
    assert "1 comparisons, 1 differ" in out


def test_transfers(script, peer, capsys):
    for name in script.Transfer.LAYOUTS:
        if hasattr(kvcacheio, name):
            setattr(peer, name, getattr(kvcacheio, name))
    assert script.main(["--peer", "a_peer", *SMALL]) == 0
    peer.transfer_kv_per_layer_pf_lf = lambda **arguments: kvcacheio.transfer_kv_per_layer_pf_lf(
        **{**arguments, "layer_id": 0}
    )
    capsys.readouterr()
    assert script.main(["--peer", "a_peer", *SMALL]) == 1
    assert "transfer_kv_per_layer_pf_lf, 24 B: DIFFERS, step 1: dst_k[0]" in capsys.readouterr().out


def test_what_cannot_be_compared_is_named(script, peer, capsys, monkeypatch):
    assert script.main(["--peer", "a_peer", "--peer", "no_such_module", *SMALL]) == 1
    assert "no_such_module: not compared, ModuleNotFoundError" in capsys.readouterr().out

    def fails(**arguments):
        raise RuntimeError("no compiler\nhere")

    setattr(peer, SWAP_IN, fails)
    assert script.main(["--peer", "a_peer", *SMALL]) == 1
    out = capsys.readouterr().out
    assert f"{SWAP_IN}, 24 B: not compared, RuntimeError: no compiler\n0 comparisons" in out
    monkeypatch.delattr(script.hisparse, SWAP_IN)
    script.main(["--peer", "a_peer", *SMALL])
    assert f"{SWAP_IN}: not compared, hisparse {script.hisparse.__version__} lacks it" in capsys.readouterr().out


def test_selections_are_what_sglang_defines(script):
    """Each position once; in short rows the valid entries first; long rows full."""
    sizes = script.Sizes("cpu", 16, 64, 24, 3, block_tokens=4, length=256)
    decode = script.Decode(np.random.default_rng(3), sizes, SWAP_IN)
    residents = decode.sides[0]["device_buffer_tokens"][0, :64].numpy()
    for length in (1, 15, 16, 60, 64, 65, 256):
        row = decode.selection(length, residents).tolist()
        chosen = [token for token in row if token >= 0]
        assert row == chosen + [-1] * (16 - len(chosen)) and len(set(chosen)) == len(chosen) == min(length, 16)
        assert max(chosen) < length
