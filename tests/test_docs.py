"""README.md and docs/: every code block runs or says why not, links lead somewhere, and the site builds."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import NEEDS_GPU, NOT_RUN, PAGES, ROOT, blocks, run_python_blocks
from places import has_gpu

import hisparse

LANGUAGES = {"python", "bash", "text", "json", "yaml"}
PAGES_FOR_A_GPU = [page for page in PAGES if any(block.remark == NEEDS_GPU for block in blocks(page))]
SHELL_BLOCKS = [block for page in PAGES for block in blocks(page, "bash")]


def name_of(block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page):
    run_python_blocks(page)


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES_FOR_A_GPU)
def test_python_blocks_run_on_a_gpu(page):
    run_python_blocks(page, with_gpu=True)


@pytest.mark.parametrize("block", [block for block in SHELL_BLOCKS if block.runs], ids=name_of)
def test_shell_blocks_run(block, tmp_path):
    if block.remark == NEEDS_GPU and not has_gpu():
        pytest.skip("no CUDA or ROCm device")
    for name, command in {"hisparse": f"{sys.executable} -m hisparse", "python": sys.executable}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(hisparse.__file__).parent.parent),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", [block for block in SHELL_BLOCKS if not block.runs], ids=name_of)
def test_shell_blocks_that_do_not_run_name_files_that_exist(block):
    assert len(block.remark) > len(NOT_RUN), "why is it not run?"
    files = re.findall(r"(?:ci|benchmarks|tests)/[\w/]+\.(?:sh|py)", block.code)
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page):
    unknown = [f"line {block.line}: {block.language!r}" for block in blocks(page) if block.language not in LANGUAGES]
    assert unknown == []
    assert (ROOT / page).read_text().count("\n```") == 2 * len(blocks(page)), "a block that was not found"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    files = re.findall(r"`((?:hisparse|kernels|ci|tests|docs|benchmarks)/[\w./]+\.\w+)`", text)
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    missing += [file for file in files if not (ROOT / file).exists()]
    assert missing == []


def test_the_site_builds_without_warnings(tmp_path):
    if importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the packages of the extra `docs` are not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "ci" / "mkdocs.yml"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([*command, "--site-dir", tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "api.html").read_text()
    for name in hisparse.__all__:
        assert name.startswith("__") or f'id="hisparse.{name}"' in reference, f"docs/api.md does not name {name}"


OPS = [
    pytest.param(function, module, id=name)
    for module in (hisparse, hisparse.kvcacheio)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and hasattr(hisparse._C, name)
]


@pytest.mark.parametrize(("function", "module"), OPS)
def test_docstrings_name_every_argument_and_what_the_call_equals(function, module):
    own, shared = inspect.getdoc(function), inspect.getdoc(module) if module is hisparse.kvcacheio else ""
    named = set(re.findall(r"^ +(\w+): ", own, re.MULTILINE)) | set(re.findall(r"``(\w+)``", shared))
    assert [name for name in inspect.signature(function).parameters if name not in named] == []
    assert re.search(r"[Ee]quals|``[^`]+ = [^`]+``", own), "what is it in plain PyTorch?"
    assert "Raises:" in own or "All raise TypeError" in shared


# README's figures


def test_the_plot_is_the_one_of_its_data(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    committed = (ROOT / "docs" / "images" / "swap_in.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip("drawn by another release of matplotlib")
    script = ROOT / "benchmarks" / "plot_readme.py"
    data = ROOT / "docs" / "data" / "h200_swap_in.json"
    subprocess.run([sys.executable, script, data, "--out", tmp_path / "plot.svg"], check=True)
    assert (tmp_path / "plot.svg").read_text() == committed, "run benchmarks/plot_readme.py docs/data/h200_swap_in.json"


def test_the_readme_s_figures_are_in_the_data_of_its_plot():
    rows = json.loads((ROOT / "docs" / "data" / "h200_swap_in.json").read_text())["rows"]
    text = " ".join((ROOT / "README.md").read_text().split())
    number = r"(\d+(?:\.\d+)?)"
    sentence = (
        "K = 2048, H = #, items of # B: a step in which everything hits takes # us; with # % misses one request takes "
        "# us and # take # us, where a kernel that only copies the same items takes # and #. "
        "The kernel of sglang 0.5.23 took #, # and # us "
    )
    said = re.search(sentence.replace("#", number), text)
    hot, item, all_hit, percent, one, batch, many, copy_one, copy_many, *peers = map(float, said.groups())

    def row(miss_rate: float, requests: float) -> dict:
        wanted = {"hot_buffer_size": hot, "item_size_bytes": item, "miss_rate": miss_rate, "batch": requests}
        wanted |= {"state": "shuffled", "host_order": "random"}
        (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
        return found

    def near(said: float, measured: float) -> bool:
        return abs(said - measured) <= (0.5 if measured >= 100 else 0.05) + 1e-9

    hits, first, last = row(0.0, 1), row(percent / 100, 1), row(percent / 100, batch)
    assert near(all_hit, hits["us"]) and near(one, first["us"]) and near(many, last["us"])
    assert near(copy_one, first["floor_us"]) and near(copy_many, last["floor_us"])
    assert [near(us, found["peer_us"]) for us, found in zip(peers, (hits, first, last), strict=True)] == [True] * 3
