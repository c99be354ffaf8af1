"""What README.md says is so: the table of targets is ci/matrix.json, limits are the kernel's."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess

import numpy as np
import pytest
from doc_blocks import ROOT, blocks, run_python_blocks

import hisparse

README = (ROOT / "README.md").read_text()
MATRIX = json.loads((ROOT / "ci" / "matrix.json").read_text())


def target_table():
    """(target, arch, warp size, largest H) of each row, as text."""
    return [
        tuple(row) for row in re.findall(r"^\| (CUDA|ROCm|CPU) \| (.*?) \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    ]


def test_the_plain_pytorch_function_equals_the_op(rng):
    torch = pytest.importorskip("torch")
    swap_in = run_python_blocks("README.md")["swap_in"]

    slots, k, item_bytes, most = 24, 10, 20, 90
    host_cache = torch.from_numpy(rng.integers(0, 256, (most, item_bytes), dtype=np.uint8))
    host_locs = torch.from_numpy(rng.permutation(most))[None]
    slot_locs = torch.from_numpy(rng.permutation(slots + 1).astype(np.int32))[None]
    state = {
        "slot_tokens": torch.full((1, slots + 1), -1, dtype=torch.int32),
        "device_buffer": torch.zeros(slots + 1, item_bytes, dtype=torch.uint8),
        "lru_slots": torch.arange(slots, dtype=torch.int16)[None],
    }
    plain = {name: tensor.clone() for name, tensor in state.items()}
    for length in range(slots + 1, most):
        top_k = torch.from_numpy(rng.integers(-1, length, (1, k), dtype=np.int32))
        locs = torch.empty_like(top_k)
        hisparse.load_cache_to_device_buffer_mla(
            top_k, state["slot_tokens"], host_locs, slot_locs, host_cache, state["device_buffer"], locs,
            torch.tensor([0]), torch.tensor([length]), state["lru_slots"], item_bytes, k, slots,
        )  # fmt: skip
        expected = swap_in(
            top_k[0], plain["slot_tokens"][0], host_locs[0], slot_locs[0], host_cache, plain["device_buffer"],
            plain["lru_slots"][0], length,
        )  # fmt: skip
        assert locs[0].tolist() == expected
        for name, tensor in state.items():
            assert torch.equal(tensor, plain[name]), name


def test_target_table_is_the_matrix():
    rows = target_table()
    cuda = [(arch.split()[0], int(warp_size)) for target, arch, warp_size, _ in rows if target == "CUDA"]
    rocm = {arch: int(warp_size) for target, arch, warp_size, _ in rows if target == "ROCm"}
    cpu = [warp_size for target, _, warp_size, _ in rows if target == "CPU"]
    assert cuda == [(arch, 32) for arch in MATRIX["cuda"]["archs"]]
    assert rocm == {arch: entry["wavefront_size"] for arch, entry in MATRIX["rocm"]["archs"].items()}
    assert cpu == [" and ".join(map(str, MATRIX["cpu"]["warp_sizes"]))]


# KiB of shared memory that one block can have, from the vendors' documentation.
SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx950": 160, "CPU": 256}
LARGEST_HOT_BUFFER = """
#include <cstdio>
#include <cstdlib>
#include "swap_in_layout.h"
int main(int, char** kib) {
  using hisparse::SwapInLayout;
  while (*++kib) {
    int largest = 0;
    for (int hot_buffer = 2048; hot_buffer <= 32768; ++hot_buffer) {
      const auto layout =
          SwapInLayout::make(2048, hot_buffer, hot_buffer > 8 * 1024 ? 0 : 2048);
      if (layout.bytes <= std::atoi(*kib) * 1024u) largest = hot_buffer;
    }
    std::printf("%d\\n", largest);
  }
}
"""


def test_largest_hot_buffers_are_what_the_layout_allows(tmp_path):
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler {compiler[0]}")
    source, program = tmp_path / "largest.cpp", tmp_path / "largest"
    source.write_text(LARGEST_HOT_BUFFER)
    subprocess.run([*compiler, "-std=c++17", f"-I{ROOT / 'kernels' / 'common'}", source, "-o", program], check=True)

    rows = [(target, arch, largest) for target, arch, _, largest in target_table() if not arch.startswith("compute")]
    sizes = [SHARED_KIB.get("CPU" if target == "CPU" else arch, 64) for target, arch, _ in rows]
    computed = subprocess.run([program, *map(str, sizes)], capture_output=True, text=True, check=True).stdout.split()
    assert [(arch, largest) for _, arch, largest in rows] == list(zip((row[1] for row in rows), computed, strict=True))
    assert all(int(largest) >= 8192 for largest in computed)


def test_the_cpu_target_s_default_shared_memory(monkeypatch):
    monkeypatch.delenv("HISPARSE_CPU_SHARED_MEMORY_BYTES", raising=False)
    assert hisparse.cpu.get_options().shared_memory_bytes == SHARED_KIB["CPU"] * 1024


def test_every_environment_variable_is_in_the_readme():
    sources = [*ROOT.glob("ci/**/*.py"), *ROOT.glob("hisparse/**/*.py"), *ROOT.glob("kernels/host/*.cpp")]
    text = "\n".join(source.read_text() for source in sources)
    read = set(re.findall(r"""(?:environ(?:\.get)?[\[(]|getenv\(|from_environment\()\s*["'](HISPARSE_\w+)""", text))
    documented = set(re.findall(r"`(HISPARSE_\w+)`", README))
    assert read, "the pattern above finds no variable at all"
    assert read == documented


def test_commands_name_files_that_exist():
    assert (ROOT / "ci" / "test.sh").is_file() and "bash ci/test.sh" in blocks("README.md", "bash")[0].code
