"""A HotBufferCache beside a model of it: every token of every request in one big array, and a plain LRU per layer."""

from __future__ import annotations

import numpy as np

import hisparse
from hisparse.presets import item_format


class LruModel:
    """Residency of one request in one layer, from the contract, with lists and dicts."""

    def __init__(self, hot: int, length: int):
        self.hot, self.order = hot, list(range(hot))
        self.token_in = dict.fromkeys(range(hot), -1)
        if length <= hot:
            self.token_in.update({token: token for token in range(length)})

    def appended(self, length: int):
        if length <= self.hot:
            self.token_in[length - 1] = length - 1

    def misses(self, tokens: list[int], length: int) -> int:
        if length <= self.hot:
            return 0
        wanted = list(dict.fromkeys(token for token in tokens if 0 <= token < length - 1))
        hits = [slot for slot in self.order if self.token_in[slot] in wanted]
        missing = [token for token in wanted if token not in self.token_in.values()]
        free = [slot for slot in self.order if slot not in hits]
        self.token_in.update(zip(free, missing, strict=False))
        self.order = free[len(missing) :] + free[: len(missing)] + hits
        return len(missing)


class CheckedCache:
    """Does everything to both, and compares them."""

    def __init__(self, item, device, seed=0, **sizes):
        self.cache = hisparse.HotBufferCache(item, device=device, **sizes)
        self.format, self.device = item_format(item), device
        self.rng = np.random.default_rng(seed)
        self.truth: dict[int, np.ndarray] = {}  # uint8 [layers, pools, tokens, item]
        self.lru: dict[tuple[int, int], LruModel] = {}
        self.reads = self.misses = 0
        self.step_of = None  # a replacement for advance, append and swap_in, such as a graph

    def to_device(self, values: np.ndarray):
        if self.device == "numpy":
            return values
        import torch

        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def to_numpy(self, array) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.cpu().numpy()

    def random_items(self, tokens: int) -> np.ndarray:
        shape = (self.cache.num_layers, self.format.pool_count, tokens, self.format.item_size_bytes)
        return self.rng.integers(0, 256, shape, dtype=np.uint8)

    def admit(self, length: int, pieces: int = 1) -> int:
        items = self.random_items(length)
        if pieces == 1:
            request = self.cache.admit(*(self.to_device(items[:, pool]) for pool in range(self.format.pool_count)))
        else:
            request = self.cache.reserve(length)
            for start, stop in zip(*[iter(self._cuts(length, pieces))] * 2, strict=True):
                for layer in self.rng.permutation(self.cache.num_layers).tolist():
                    self.cache.write(request, layer, *map(self.to_device, items[layer, :, start:stop]), start=start)
        assert request not in self.truth
        self.truth[request] = items
        for layer in range(self.cache.num_layers):
            self.lru[request, layer] = LruModel(self.cache.hot_buffer_size, length)
        return request

    def _cuts(self, length: int, pieces: int) -> list[int]:
        cuts = np.linspace(0, length, pieces + 1).astype(int).tolist()
        return [cut for pair in zip(cuts, cuts[1:], strict=False) for cut in pair]

    def release(self, request: int) -> None:
        self.cache.release(request)
        del self.truth[request]

    def selection(self, requests: list[int], padding: int) -> np.ndarray:
        """int32 [layers, rows, K], rows of padding and some columns more than asked for filled with anything."""
        cache, block = self.cache, self.format.block_tokens
        top_k = self.rng.integers(-5, 50, (cache.num_layers, len(requests) + padding, cache.top_k + 2), dtype=np.int32)
        for layer in range(cache.num_layers):
            for row, request in enumerate(requests):
                choices = np.arange(-1, -(-cache.length(request) // block))
                repeats = cache.top_k > len(choices) or self.rng.random() < 0.3
                top_k[layer, row, : cache.top_k] = self.rng.choice(choices, cache.top_k, replace=bool(repeats))
        return top_k

    def step(self, requests: list[int], padding: int = 1) -> None:
        cache = self.cache
        cache.schedule(requests)
        padding = min(padding, cache.max_batch - len(requests))
        newest = self.random_items(len(requests) + padding)
        for row, request in enumerate(requests):
            self.truth[request] = np.concatenate([self.truth[request], newest[:, :, row : row + 1]], axis=2)
            for layer in range(cache.num_layers):
                self.lru[request, layer].appended(cache.length(request))
        top_k = self.selection(requests, padding)
        outputs = (self.step_of or self.plain_step)(newest, top_k)
        for layer, locs in enumerate(outputs):
            self.check_layer(layer, requests, top_k[cache.index_layers[layer]], self.to_numpy(locs))

    def plain_step(self, newest: np.ndarray, top_k: np.ndarray):
        """Yields the locs of each layer, before the next one is swapped in."""
        cache = self.cache
        cache.advance()
        for layer, leader in enumerate(cache.index_layers):
            cache.append(layer, *map(self.to_device, newest[layer]))
            yield cache.swap_in(layer, self.to_device(top_k[layer]) if leader == layer else None)

    def check_layer(self, layer: int, requests: list[int], top_k: np.ndarray, locs: np.ndarray) -> None:
        cache, block = self.cache, self.format.block_tokens
        assert (locs[len(requests) :] == -1).all(), "padding has locs"
        for row, request in enumerate(requests):
            length, entries = cache.length(request), top_k[row, : cache.top_k]
            tokens = np.where(entries[:, None] < 0, -1, entries[:, None] * block + np.arange(block)).reshape(-1)
            tokens[tokens >= length] = -1
            assert ((locs[row] >= 0) == (tokens >= 0)).all()
            used = tokens >= 0
            assert np.isin(locs[row][used], cache.slot_locs(request)).all(), "a loc of another request"
            held = self.device_items(layer, locs[row][used])
            assert np.array_equal(held, self.truth[request][layer][:, tokens[used]]), (
                f"layer {layer}, request {request}"
            )
            if cache.index_layers[layer] == layer:
                misses = self.lru[request, layer].misses(tokens.tolist(), length)
                assert int(self.to_numpy(cache.miss_count(layer))[row]) == misses
            shared = cache.index_layers.count(layer)
            if shared:
                self.reads += shared * int(used.sum())
                self.misses += shared * misses

    def device_items(self, layer: int, locs: np.ndarray) -> np.ndarray:
        """uint8 [pools, locs, item], read out of the pools by their documented layout."""
        pools = self.cache.device_items(layer)
        pools = [self.to_numpy(pool) for pool in (pools if isinstance(pools, tuple) else (pools,))]
        if self.format.layout != "dsv4":
            return np.stack([pool[locs] for pool in pools])
        items = np.empty((1, len(locs), 584), np.uint8)
        for n, loc in enumerate(locs.tolist()):
            page, place = pools[0][loc // 64], loc % 64
            items[0, n, :576], items[0, n, 576:] = page[place * 576 :][:576], page[36864 + place * 8 :][:8]
        return items

    def check_state(self) -> None:
        """What holds between steps: all bytes are there, and no page or slot has two owners."""
        cache = self.cache
        assert sorted(cache.requests) == sorted(self.truth)
        assert cache.free_requests == cache.max_requests - len(self.truth)
        pages = sum(-(-items.shape[2] // cache.page_size) for items in self.truth.values())
        assert cache.free_host_tokens == cache.host_tokens - pages * cache.page_size
        for request, items in self.truth.items():
            assert cache.length(request) == items.shape[2]
            for layer in range(cache.num_layers):
                parts = np.stack([self.to_numpy(part) for part in cache.read(request, layer)])
                assert np.array_equal(parts, items[layer]), f"request {request}, layer {layer}"
                held = cache.slot_tokens(request, layer)
                held = held[held >= 0]
                assert len(set(held.tolist())) == len(held), "a token is in two slots"
        statistics = cache.statistics()
        assert (statistics.reads, statistics.misses) == (self.reads, self.misses)
        assert statistics.host_to_device_bytes == self.misses * self.format.token_bytes
