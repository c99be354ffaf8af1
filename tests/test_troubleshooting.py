"""Every message that docs/troubleshooting.md lists is one that is raised: here each of them is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import torch
from troubleshooting import MESSAGES, check

import hisparse
import hisparse.kvcacheio as kvcacheio

SWAP_IN = {
    "top_k_tokens": np.zeros((1, 2), np.int32),
    "device_buffer_tokens": np.full((1, 5), -1, np.int32),
    "host_cache_locs": np.zeros((1, 9), np.int64),
    "device_buffer_locs": np.zeros((1, 5), np.int32),
    "host_cache": np.zeros((9, 16), np.uint8),
    "device_buffer": np.zeros((5, 16), np.uint8),
    "top_k_device_locs": np.zeros((1, 2), np.int32),
    "req_pool_indices": np.zeros(1, np.int64),
    "seq_lens": np.ones(1, np.int64),
    "lru_slots": np.arange(4, dtype=np.int16)[None],
    "item_size_bytes": 16,
    "num_top_k": 2,
    "hot_buffer_size": 4,
}


def swap_in(**others):
    return lambda: hisparse.load_cache_to_device_buffer_mla(**SWAP_IN | others)


def too_little_shared_memory():
    with hisparse.cpu.options(shared_memory_bytes=64):
        swap_in()()


def a_layer_that_is_not_there():
    pools, indices = [np.zeros((4, 16), np.uint8) for _ in range(2)], np.zeros(1, np.int64)
    kvcacheio.transfer_kv_per_layer_mla_pf_lf(*pools, indices, indices, 2, 8, 16)


def a_read_only_array():
    array = np.zeros((1, 2), np.int32)
    array.flags.writeable = False
    swap_in(top_k_device_locs=array)()


def lazily_negated():
    if torch is None:
        pytest.skip("torch is not installed")
    negated = torch.zeros(9, 16, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    swap_in(host_cache=negated)()


WIDE = np.zeros((2, 8), np.int32)
UNEQUAL_ROWS = swap_in(device_buffer_tokens=np.full((2, 5), -1, np.int32), device_buffer_locs=WIDE[:, :5])
# How a listed message begins: (what is raised, by what)
ON_THE_CPU = {
    "num_top_k, hot_buffer_size: expected a plan": (ValueError, too_little_shared_memory),
    "hot_buffer_size: expected at least num_top_k": (ValueError, swap_in(num_top_k=5)),
    "hot_buffer_size: expected at most 32768": (ValueError, swap_in(hot_buffer_size=32769)),
    "...: expected dtype": (TypeError, swap_in(seq_lens=np.ones(1, np.int16))),
    "...: expected a dense torch.Tensor": (TypeError, swap_in(lru_slots=[[0, 1, 2, 3]])),
    "...: expected shape": (ValueError, swap_in(hot_buffer_size=5)),
    "...: expected a contiguous last dimension": (ValueError, swap_in(top_k_tokens=WIDE[:1, ::2])),
    "...: needs contiguous rows": (ValueError, swap_in(host_cache=np.zeros((9, 32), np.uint8)[:, :16])),
    "device_buffer_locs: expected the row stride": (ValueError, UNEQUAL_ROWS),
    "...: expected miss_src, miss_dst and miss_count": (ValueError, swap_in(miss_count=np.zeros(1, np.int32))),
    "block_size: expected a multiple": (ValueError, swap_in(block_size=100)),
    "layer_id: expected": (IndexError, a_layer_that_is_not_there),
    "...: expected a writable array": (ValueError, a_read_only_array),
    "...: expected a tensor that is resolved": (ValueError, lazily_negated),
}

# How a listed message begins: what leads to `message` on a machine with a fake driver
ON_A_GPU = {
    "no ... device: the driver": """
        driver.library.fake_setup(0, 65536)
        message = error_of(RuntimeError, Call(driver))
    """,
    "no ... device ...: the driver": "message = error_of(RuntimeError, Call(driver, index=2))",
    "hisparse was built for": """
        driver.fail("cuModuleLoadData", "hipModuleLoadData", 209)
        message = error_of(RuntimeError, Call(driver))
    """,
    "... was in use before": """
        call = Call(driver)
        call()
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, error_of(RuntimeError, call).encode())
            os._exit(0)
        os.wait()
        message = os.read(reader, 10_000).decode()
    """,
    "... failed with error": """
        driver.fail("cuLaunchKernel", "hipModuleLaunchKernel", 719)
        message = error_of(RuntimeError, Call(driver))
    """,
    "...: expected host memory that": "message = error_of(ValueError, Call(driver, mapped=False))",
    "...: expected a tensor on": "message = error_of(ValueError, Call(driver), seq_lens=np.zeros(2, np.int32))",
    "...: indices on the device": """
        from hisparse import kvcacheio
        pool, indices = Tensor(np.zeros((4, 16), np.uint8)), Tensor(np.zeros(1, np.int64))
        driver.library.fake_capture(1)
        message = error_of(RuntimeError, kvcacheio.transfer_kv_direct, [pool], [pool], indices, indices, 1)
    """,
}
ELSEWHERE = ("... is hisparse's source", "hisparse was built without", "no ... driver")


def test_every_listed_message_is_tested():
    starts = (*ON_THE_CPU, *ON_A_GPU, *ELSEWHERE)
    assert len(MESSAGES) == len(starts)
    assert [message for message in MESSAGES if not message.startswith(starts)] == []


@pytest.mark.parametrize("start", ON_THE_CPU)
def test_on_the_cpu(start):
    kind, call = ON_THE_CPU[start]
    with pytest.raises(kind) as error:
        call()
    check(start, str(error.value))


@pytest.mark.parametrize("start", ON_A_GPU)
def test_on_a_gpu(run, start):
    script = "\n".join(line.removeprefix("        ") for line in ON_A_GPU[start].splitlines())
    run(f"{script}\nfrom troubleshooting import check\ncheck({start!r}, message)")


def test_the_source_without_the_extension(tmp_path):
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "data")
    shutil.copytree(Path(hisparse.__file__).parent, tmp_path / "hisparse", ignore=ignored)
    environment = os.environ | {"PYTHONPATH": ""}
    command = [sys.executable, "-S", "-c", "import hisparse"]  # an editable installation would find its extension
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    check("... is hisparse's source", done.stderr.strip().splitlines()[-1].removeprefix("ImportError: "))


def test_a_target_without_a_driver_or_code():
    script = "from hisparse import _C\nfor target in _C.targets(): print(target['unavailable'])"
    nowhere = {f"HISPARSE_{name}_LIBRARY": "/nowhere/lib.so" for name in ("CUDA", "HIP")}
    environment = os.environ | nowhere | {"PYTHONPATH": str(Path(hisparse.__file__).parent.parent)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    built = hisparse.build_info()["targets"]
    for target, message in zip(("cpu", "cuda", "rocm"), done.stdout.splitlines(), strict=True):
        if target != "cpu":
            check("no ... driver" if target in built else "hisparse was built without", message)
