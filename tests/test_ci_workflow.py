"""The CI workflow against its schema, the matrix and the scripts that it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ci_matrix
import pytest
from hisparse_build.matrix import CUDA_ARCHS, MATRIX, ROCM_ARCHS

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
VERSION = (ROOT / "hisparse" / "_version.py").read_text().split('"')[1]


def test_the_workflow_keeps_its_schema():
    checker = shutil.which("check-jsonschema", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if checker is None:
        pytest.skip("check-jsonschema is not installed")
    subprocess.run([checker, "--builtin-schema", "vendor.github-workflows", WORKFLOW], check=True)


def test_the_workflow_runs_scripts_that_exist_and_names_no_arch():
    text = WORKFLOW.read_text()
    scripts = set(re.findall(r"\bci/\w+\.(?:sh|py)", text))
    assert {"ci/test.sh", "ci/build_arch.sh", "ci/build_wheel.sh", "ci/check_wheel.sh", "ci/test_wheel.sh"} <= scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    code = "\n".join(line.partition("#")[0] for line in text.splitlines())
    assert re.findall(r"gfx\w+|sm_\d+", code) == []


def test_outputs_that_the_workflow_reads_are_those_that_are_written():
    read = set(re.findall(r"steps\.read\.outputs\.(\w+)", WORKFLOW.read_text()))
    passed_on = set(re.findall(r"needs\.matrix\.outputs\.(\w+)", WORKFLOW.read_text()))
    assert read == passed_on == set(ci_matrix.outputs(""))


def test_there_is_a_job_for_every_arch_width_and_python():
    outputs = ci_matrix.outputs('["gfx942"]')
    assert outputs["archs"] == [*ROCM_ARCHS, *(arch for arch in CUDA_ARCHS if arch.startswith("sm_"))]
    assert outputs["warp_sizes"] == MATRIX["cpu"]["warp_sizes"] and outputs["pythons"] == MATRIX["python"]
    assert outputs["gpus"] == ["gfx942"]


def test_a_runner_with_a_gpu_that_the_matrix_lacks_is_refused():
    with pytest.raises(SystemExit, match="unknown architecture gfx906"):
        ci_matrix.outputs(json.dumps(["gfx906"]))


@pytest.mark.parametrize(("tag", "accepted"), [(f"v{VERSION}", True), (VERSION, False), ("v9.9.9", False), ("", False)])
def test_a_tag_unlike_the_version_is_refused(tag, accepted):
    done = subprocess.run(["bash", ROOT / "ci" / "check_tag.sh", tag], capture_output=True, text=True)
    assert (done.returncode == 0) == accepted
    assert accepted or f"expected v{VERSION}" in done.stderr


def test_every_variant_of_the_wheel_has_the_cpu_target():
    variants = MATRIX["wheel"]["variants"]
    assert variants["universal"] == ["cpu", "cuda", "rocm"]
    assert all(targets[0] == "cpu" for targets in variants.values())
    assert set(MATRIX["cuda"]["ptx_versions"]) == {arch.split("_")[1] for arch in CUDA_ARCHS}
