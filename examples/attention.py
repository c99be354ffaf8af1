"""A small decoder whose KV cache lives in host memory, checked against one that keeps it all on the device.

    python examples/attention.py [--device cuda] [--steps 64]

Each layer has an indexer, as DeepSeek-V3.2's have: small index keys of all tokens stay on the device, their products
with the index query pick K positions, and attention reads the KV of those alone. Here the KV comes out of a
hisparse.HotBufferCache. The check computes each output in two more ways from a full KV cache: at the same positions in
the same order, which gives the same bits, and as full attention with all other positions masked, which adds the same
terms in another order. On a GPU the whole step is one CUDA graph.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn

import hisparse

WIDTH, HEADS, HEAD_WIDTH, INDEX_WIDTH = 64, 4, 32, 16
LAYERS, TOP_K, HOT_BUFFER, CONTEXT = 2, 16, 48, 256
PROMPTS = (200, 60, 44, 5)  # two long ones, one that outgrows its hot buffer, a short one


class SparseAttention(nn.Module):
    """One layer; all heads share one key and one value of 32 numbers, which are a token's item."""

    def __init__(self, layer: int, cache: hisparse.HotBufferCache) -> None:
        super().__init__()
        self.layer, self.cache = layer, cache
        self.query = nn.Linear(WIDTH, HEADS * HEAD_WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * HEAD_WIDTH, bias=False)
        self.index_query = nn.Linear(WIDTH, INDEX_WIDTH, bias=False)
        self.index_key = nn.Linear(WIDTH, INDEX_WIDTH, bias=False)
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=False)
        # One row more than there are requests: the rows of padding write to it.
        self.register_buffer("index_keys", torch.zeros(cache.max_requests + 1, CONTEXT, INDEX_WIDTH))
        self.register_buffer(
            "full_cache", torch.zeros(cache.max_requests + 1, CONTEXT, 2 * HEAD_WIDTH)
        )  # for the check
        self.selected = torch.empty(0)  # of the last step, for the check

    def prefill(self, request: int, x: torch.Tensor) -> torch.Tensor:
        """A prompt [tokens, WIDTH], with dense attention."""
        key_value = self.key_value(x)
        self.cache.write(request, self.layer, key_value)
        self.full_cache[request, : len(x)] = key_value
        self.index_keys[request, : len(x)] = self.index_key(x)
        key, value = key_value.split(HEAD_WIDTH, dim=-1)
        logits = self.query(x).view(len(x), HEADS, HEAD_WIDTH).transpose(0, 1) @ key.T / math.sqrt(HEAD_WIDTH)
        logits += torch.full((len(x), len(x)), -math.inf, device=x.device).triu(1)
        return x + self.out((logits.softmax(-1) @ value).transpose(0, 1).flatten(1))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """The newest tokens [B, WIDTH], one of each scheduled request and then padding."""
        cache, rows = self.cache, self.cache.rows[: len(x)].long()
        newest = self.cache.seq_lens[: len(x)].long() - 1
        key_value = self.key_value(x)
        cache.append(self.layer, key_value)
        self.full_cache[rows, newest] = key_value
        self.index_keys[rows, newest] = self.index_key(x)
        scores = (self.index_keys[rows] @ self.index_query(x)[:, :, None]).squeeze(-1)
        unseen = torch.arange(CONTEXT, device=x.device) > newest[:, None]
        best = scores.masked_fill(unseen, -math.inf).topk(TOP_K)
        self.selected = torch.where(best.values == -math.inf, -1, best.indices).int()
        locs = cache.swap_in(self.layer, self.selected)
        items = cache.device_items(self.layer).view(torch.float32)[locs.clamp(min=0)]
        return self.attend(x, items, locs < 0)

    def attend(self, x: torch.Tensor, items: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        """x + attention over items [B, tokens, 2 * HEAD_WIDTH], without the unused ones."""
        key, value = items.split(HEAD_WIDTH, dim=-1)
        query = self.query(x).view(len(x), HEADS, HEAD_WIDTH)
        logits = query @ key.transpose(1, 2) / math.sqrt(HEAD_WIDTH)
        weights = logits.masked_fill(unused[:, None], -math.inf).softmax(-1)
        return x + self.out((weights @ value).flatten(1))


class Decoder(nn.Module):
    def __init__(self, cache: hisparse.HotBufferCache) -> None:
        super().__init__()
        self.cache = cache
        self.layers = nn.ModuleList(SparseAttention(layer, cache) for layer in range(cache.num_layers))

    def prefill(self, prompt: torch.Tensor) -> int:
        request, x = self.cache.reserve(len(prompt)), prompt
        for layer in self.layers:
            x = layer.prefill(request, x)
        return request

    def decode(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One step: what goes into each layer, and what comes out of the last."""
        self.cache.advance()
        states = [x]
        for layer in self.layers:
            states.append(layer.decode(states[-1]))
        return states


class Graph:
    """A step captured once; each call replays it with other requests."""

    def __init__(self, decoder: Decoder, x: torch.Tensor) -> None:
        self._x = x.clone()
        decoder.decode(self._x)  # what is set up at first use must not be captured
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._states = decoder.decode(self._x)

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._x.copy_(x)
        self._graph.replay()
        return self._states


def largest_difference(layer: SparseAttention, x: torch.Tensor, got: torch.Tensor, requests: list[int]) -> float:
    """Compares one layer's outputs with those from its full cache."""
    full = layer.full_cache[requests]
    selected = layer.selected[: len(x)].long()
    rows = torch.arange(len(x), device=x.device)[:, None]
    same_order = layer.attend(x, full[rows, selected.clamp(min=0)], selected < 0)
    if not torch.equal(got, same_order):
        raise AssertionError(f"layer {layer.layer}: not the bits of a full cache at the same positions")
    masked = torch.ones(full.shape[:2], dtype=torch.bool, device=x.device)
    masked[rows.expand_as(selected)[selected >= 0], selected[selected >= 0]] = False
    return float((got - layer.attend(x, full, masked)).abs().max())


@torch.inference_mode()
def run(device: str, steps: int, seed: int = 0) -> tuple[float, hisparse.HotBufferCache]:
    """The largest difference from masked full attention, and the cache. Raises where bits differ."""
    torch.manual_seed(seed)
    cache = hisparse.HotBufferCache(
        2 * HEAD_WIDTH * 4,
        num_layers=LAYERS,
        max_requests=len(PROMPTS),
        hot_buffer_size=HOT_BUFFER,
        top_k=TOP_K,
        host_tokens=1024,
        max_context=CONTEXT,
        page_size=16,
        device=device,
    )
    decoder = Decoder(cache).to(device)
    step = Graph(decoder, torch.zeros(len(PROMPTS), WIDTH, device=device)) if "cuda" in device else decoder.decode
    requests = [decoder.prefill(torch.randn(length, WIDTH, device=device)) for length in PROMPTS]
    difference = 0.0
    for _ in range(steps):
        cache.schedule(requests)
        states = step(torch.randn(len(requests), WIDTH, device=device))
        for layer, x, got in zip(decoder.layers, states, states[1:], strict=False):
            difference = max(difference, largest_difference(layer, x, got, requests))
    return difference, cache


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=48)
    args = parser.parse_args()
    largest, used = run(args.device, args.steps)
    numbers = used.statistics()
    print(f"{args.steps} steps of {LAYERS} layers on {args.device}: {numbers.reads} reads, {numbers.misses} misses.")
    print("Every output has the bits of a full cache at the same positions;")
    print(f"masked full attention differs by at most {largest:.1e}.")
