"""What the check of contents costs a call: the median time without it, with it, and the ratio.

    python benchmarks/bench_content_check.py [--device cuda]

Each call is waited for, as with the check it has to be.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import numpy as np

import hisparse

CASES = [(1, 64, 256, 1000), (4, 2048, 4096, 32768), (100, 2048, 4096, 32768)]  # B, K, H, tokens of a sequence
ITEM_BYTES = 512


def make_call(batch: int, num_top_k: int, hot: int, length: int, device: str):
    """A swap-in that can be repeated: after the first call everything hits."""
    rng = np.random.default_rng(1)
    arrays = {
        "top_k_tokens": np.stack([rng.permutation(length - 1)[:num_top_k] for _ in range(batch)]).astype(np.int32),
        "device_buffer_tokens": np.full((batch, hot + 1), -1, np.int32),
        "host_cache_locs": np.tile(rng.permutation(length), (batch, 1)),
        "device_buffer_locs": np.arange(batch * (hot + 1), dtype=np.int32).reshape(batch, hot + 1),
        "host_cache": np.zeros((length, ITEM_BYTES), np.uint8),
        "device_buffer": np.zeros((batch * (hot + 1), ITEM_BYTES), np.uint8),
        "top_k_device_locs": np.zeros((batch, num_top_k), np.int32),
        "req_pool_indices": np.arange(batch),
        "seq_lens": np.full(batch, length),
        "lru_slots": np.tile(rng.permutation(hot).astype(np.int16), (batch, 1)),
    }
    finish = contextlib.nullcontext
    if device != "cpu":
        import torch

        finish = torch.cuda.synchronize
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        arrays = {name: t.pin_memory() if name == "host_cache" else t.to(device) for name, t in tensors.items()}

    def call() -> None:
        hisparse.load_cache_to_device_buffer_mla(
            **arrays, item_size_bytes=ITEM_BYTES, num_top_k=num_top_k, hot_buffer_size=hot, block_size=1024
        )
        finish()

    return call


def median_us(call, seconds: float) -> float:
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA or ROCm device of torch")
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure")
    options = parser.parse_args()
    print("| B | K | H | without, us | with, us | ratio |\n|---|---|---|---|---|---|")
    for batch, num_top_k, hot, length in CASES:
        call = make_call(batch, num_top_k, hot, length, options.device)
        call()
        without = median_us(call, options.seconds)
        with hisparse.checking():
            checked = median_us(call, options.seconds)
        print(
            f"| {batch} | {num_top_k} | {hot} | {without:.1f} | {checked:.1f} | {checked / without:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
