"""`hisparse info`: what covers a device, and what is shown of targets, drivers and devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hisparse
from hisparse import cli, info

BUILT = ["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"]


@pytest.mark.parametrize(
    ("arch", "covered"),
    [
        ("sm_75", None),
        ("sm_80", "sm_80"),
        ("sm_86", "sm_80"),
        ("sm_89", "sm_80"),
        ("sm_90", "sm_90"),
        ("sm_103", "sm_100"),
        ("sm_110", "compute_80"),
        ("sm_121", "sm_120"),
        ("sm_130", "compute_80"),
    ],
)
def test_a_cuda_device_runs_code_of_its_generation_or_ptx(arch, covered):
    assert info.covering_arch("cuda", arch, BUILT) == covered


def test_code_with_arch_specific_features_runs_on_that_arch_alone():
    assert info.covering_arch("cuda", "sm_90", ["sm_90a"]) == "sm_90a"
    assert info.covering_arch("cuda", "sm_103", ["sm_100a", "compute_100a"]) is None


@pytest.mark.parametrize(("arch", "covered"), [("gfx942", "gfx942"), ("gfx940", None), ("gfx1100", None)])
def test_a_rocm_device_runs_code_for_its_arch_alone(arch, covered):
    assert info.covering_arch("rocm", arch, ["gfx90a", "gfx942"]) == covered


def test_the_cpu_is_always_covered():
    assert info.covering_arch("cpu", "cpu", []) == "cpu"


def test_json_is_what_this_install_has(capsys):
    assert cli.main(["info", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["version"] == hisparse.__version__
    targets = {target["target"]: target for target in shown["targets"]}
    assert list(targets) == ["cpu", "cuda", "rocm"]
    assert [name for name, target in targets.items() if target["built"]] == hisparse.build_info()["targets"]
    (cpu,) = targets["cpu"]["devices"]
    assert cpu["covered_by"] == "cpu" and targets["cpu"]["library"] is None


def test_text_names_every_target_and_why_it_has_no_device(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"hisparse {hisparse.__version__}, ")
    for target in info.collect()["targets"]:
        assert f"\n{target['target']}" in text
        if target["built"] and target["unavailable"]:
            assert target["unavailable"] in text


def run_with_driver(kind: str, driver: Path) -> dict:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(hisparse.__file__).parent.parent),
        f"HISPARSE_{kind.upper()}_LIBRARY": str(driver),
    }
    command = [sys.executable, "-m", "hisparse", "info"]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    shown = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=True).stdout
    return {"text": text} | {target["target"]: target for target in json.loads(shown)["targets"]}


def test_a_driver_is_shown_with_its_file_version_and_devices(kind, build_driver):
    driver = build_driver(kind)
    shown = run_with_driver(kind, driver)
    target = shown["cuda" if kind == "cuda" else "rocm"]
    assert target["library"] == str(driver) and target["unavailable"] is None
    assert target["driver_version"] == ("12.8" if kind == "cuda" else "7.1.25424")
    archs = ["sm_75", "sm_76"] if kind == "cuda" else ["gfx942", "gfx950"]
    assert [device["arch"] for device in target["devices"]] == archs
    expected = [None, None] if kind == "cuda" else [arch if arch in target["archs"] else None for arch in archs]
    assert [device["covered_by"] for device in target["devices"]] == expected
    assert str(driver) in shown["text"]
    assert ("NOT COVERED" in shown["text"]) == (None in expected)
    assert f"0: Fake GPU, {archs[0]}, warp size 32, 64 KiB shared memory per block" in shown["text"]


def test_two_runtimes_of_a_kind_are_warned_of():
    found = info.collect() | {"mapped_runtimes": ["/a/libamdhip64.so.6", "/b/libamdhip64.so.7", "/c/libcuda.so.1"]}
    warnings = [line for line in info.lines(found) if "WARNING" in line]
    assert len(warnings) == 1 and "/a/libamdhip64.so.6, /b/libamdhip64.so.7" in warnings[0]
