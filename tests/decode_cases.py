"""Requests in decode, step by step, on one state: what each call leaves is what the next one finds."""

from __future__ import annotations

import kvcacheio_reference
import numpy as np
import reference
from places import Guarded, assert_same, call
from swap_in_cases import TABLES, Row, SwapInCase, check, make_case, random_entries

import hisparse
from hisparse import kvcacheio

BRINGS = ("none", "copy_items", "transfer_kv_per_layer_mla", "transfer_kv_direct")


class Decode:
    """Requests that grow by a token a step. A step takes some of them in any order, pads the batch, and hands the state
    that the op leaves to the next step.

    `hit_rate` is that of the next step. `brings` says how the newest tokens get from the host cache to their slots: by
    an op, or by the test itself.
    """

    def __init__(self, rng, requests, num_top_k, hot_buffer_size, item_size_bytes, page_size, steps, pool_leads=(0, 0)):
        self.rng, self.hit_rate, self.brings, self.calls = rng, 0.9, "none", 0
        # Some requests are short and grow over the length of the buffer, the others start cold.
        spread = rng.integers(-(steps // 2) - 1, 3 * hot_buffer_size, requests)
        lengths = np.maximum(hot_buffer_size + spread, 1)
        rows = [Row(int(n), [], None if n <= hot_buffer_size else {}) for n in lengths]
        case = make_case(
            rng,
            rows,
            num_top_k=num_top_k,
            hot_buffer_size=hot_buffer_size,
            item_size_bytes=item_size_bytes,
            page_size=page_size,
            pool_leads=pool_leads,
            max_tokens=int(max(lengths.max(), 2 * hot_buffer_size)) + steps + 1,
            stale_host_locs=False,
        )
        self.sizes = case.sizes
        self.tables = {name: case.arrays[name] for name in TABLES}
        self.rids = case["req_pool_indices"].copy()
        self.length = dict(zip(self.rids.tolist(), lengths.tolist(), strict=True))

    def step(self, place, *, plan: bool | None = None, index_dtypes=(np.int32, np.int64), **options) -> None:
        rng, hot, num_top_k = self.rng, self.sizes["hot_buffer_size"], self.sizes["num_top_k"]
        views = {name: table.view for name, table in self.tables.items()}
        chosen = rng.permutation(self.rids)[: rng.integers(1, len(self.rids) + 1)]
        rows, newest = [], []
        for rid in chosen.tolist():
            self.length[rid] += 1
            length = self.length[rid]
            if rng.random() < 0.03:  # another request has taken this place in the tables
                length = self.length[rid] = hot + 1 + int(rng.integers(hot))
                views["device_buffer_tokens"][rid, :hot] = -1
                views["lru_slots"][rid, :hot] = np.arange(hot)
            slot = hot if length > hot else length - 1
            newest.append((views["host_cache_locs"][rid, length - 1], views["device_buffer_locs"][rid, slot]))
            slot_tokens = views["device_buffer_tokens"][rid, :hot]
            entries = (
                random_entries(rng, slot_tokens, length, num_top_k, self.hit_rate)
                if length > hot
                else rng.integers(-1, length + 1, num_top_k)
            )
            rows.append(Row(length, entries, slot_tokens.copy(), views["lru_slots"][rid, :hot].copy()))
        self.bring(place, newest)

        skips = bool(options.get("skip_io"))
        case = make_case(
            rng,
            rows + [Row(hot + 5, range(num_top_k)) for _ in range(rng.integers(3))],
            num_real_reqs=len(rows),
            plan=skips or (bool(rng.random() < 0.7) if plan is None else plan),
            spare_requests=0,
            index_dtypes=index_dtypes,
            **self.sizes,
        )
        case.arrays |= self.tables
        case["req_pool_indices"][: len(rows)] = chosen
        case["req_pool_indices"][len(rows) :] = rng.choice(self.rids, len(case["seq_lens"]) - len(rows))
        after = check(place, case, **options)
        self.calls += 1
        self.tables = {name: after.arrays[name] for name in TABLES}
        if skips:
            self.replay(place, after, len(rows))

    def replay(self, place, after: SwapInCase, rows: int) -> None:
        """Copies what a plan names: then every resident token has its bytes again, as the next step will see."""
        counts = range(rows), [after.misses(b) for b in range(rows)]
        pairs = [[after[name][b, :n] for b, n in zip(*counts, strict=True)] for name in ("miss_src", "miss_dst")]
        self.move(place, "copy_items", *(np.concatenate(side) for side in pairs))

    def bring(self, place, newest: list[tuple[int, int]]) -> None:
        if self.brings == "none":
            for host_loc, device_loc in newest:
                self.tables["device_buffer"].view[device_loc] = self.tables["host_cache"].view[host_loc]
        else:
            self.move(place, self.brings, *np.array(newest).T)

    def move(self, place, op: str, host_locs: np.ndarray, device_locs: np.ndarray) -> None:
        """Items from the host cache to the device buffer, by an op and by the reference."""
        item = self.sizes["item_size_bytes"]
        arrays = {
            "src": self.tables["host_cache"],
            "dst": self.tables["device_buffer"],
            "src_indices": Guarded.of(self.rng, host_locs, np.int64),
            "dst_indices": Guarded.of(self.rng, device_locs, np.int64),
        }
        expected = {name: array.copy() for name, array in arrays.items()}
        views = {name: array.view for name, array in expected.items()}
        if op == "transfer_kv_direct":
            indices = (views["src_indices"], views["dst_indices"])
            kvcacheio_reference.transfer_kv_direct([views["src"]], [views["dst"]], *indices, 1)
            actual = call(place, _direct, arrays)
        else:
            reference.copy_items(**views, item_size_bytes=item)
            function = hisparse.copy_items if op == "copy_items" else kvcacheio.transfer_kv_per_layer_mla
            sizes = {"item_size_bytes": item} if op == "copy_items" else {"item_size": item}
            actual = call(place, function, arrays, **sizes)
        assert_same(actual, expected)
        self.calls += 1
        self.tables["device_buffer"] = actual["dst"]


def _direct(src, dst, src_indices, dst_indices) -> None:
    return kvcacheio.transfer_kv_direct([src], [dst], src_indices, dst_indices, 1)
