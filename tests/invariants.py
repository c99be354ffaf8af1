"""What must hold after every swap-in, whatever the policy: nothing here is compared with the reference."""

from __future__ import annotations

import numpy as np
from places import Guarded, assert_same
from reference import item_rows, real_rows


def check_swap_in_invariants(
    before: dict[str, Guarded], after: dict[str, Guarded], sizes: dict[str, int], skip_io: bool = False
) -> None:
    """`before` and `after` are the arrays of the call by argument name, guards included.

    Before the call the bytes of resident tokens have to be in their slots, as they are after any earlier call.
    """
    _Call(before, after, sizes, skip_io).check()


class _Call:
    def __init__(self, before, after, sizes, skip_io):
        self.arrays_before, self.arrays_after, self.skip_io = before, after, skip_io
        self.before = {name: array.view for name, array in before.items()}
        self.after = {name: array.view for name, array in after.items()}
        self.item, self.num_top_k, self.hot = (
            sizes[name] for name in ("item_size_bytes", "num_top_k", "hot_buffer_size")
        )
        self.host_items = item_rows(self.before["host_cache"], self.item)
        self.device_items = item_rows(self.after["device_buffer"], self.item)
        self.real = real_rows(len(self.before["top_k_tokens"]), self.before.get("num_real_reqs"))
        self.records = "miss_count" in after

    def check(self) -> None:
        # The arrays as they are after the call, with what the call may write put back: nothing else may differ.
        restored = {name: array.copy() for name, array in self.arrays_after.items()}

        def put_back(name, place):
            restored[name].view[place] = self.before[name][place]

        put_back("top_k_device_locs", np.s_[:, : self.num_top_k])
        for b in range(len(self.before["top_k_tokens"])):
            if b >= self.real:
                assert (self.after["top_k_device_locs"][b, : self.num_top_k] == -1).all(), f"row {b}: padding, not -1"
                continue
            rid = int(self.before["req_pool_indices"][b])
            filled = self.check_row(b, rid)
            put_back("device_buffer_tokens", (rid, filled))
            if int(self.before["seq_lens"][b]) > self.hot:
                put_back("lru_slots", np.s_[rid, : self.hot])
            if not self.skip_io:
                put_back("device_buffer", self.before["device_buffer_locs"][rid, filled])
            if self.records:
                put_back("miss_src", np.s_[b, : self.num_top_k])
                put_back("miss_dst", np.s_[b, : self.num_top_k])
                put_back("miss_count", b)
        assert_same(restored, self.arrays_before)

    def check_row(self, b: int, rid: int) -> np.ndarray:
        """Looks at a real row and returns the slots that it filled."""
        seq_len = int(self.before["seq_lens"][b])
        entries = self.before["top_k_tokens"][b, : self.num_top_k]
        output = self.after["top_k_device_locs"][b, : self.num_top_k]
        locs = self.before["device_buffer_locs"][rid, : self.hot + 1]
        valid = (entries >= 0) & (entries < seq_len)
        assert (output[~valid] == -1).all(), f"row {b}: an invalid entry has a loc"
        assert np.isin(output[valid], locs).all(), f"row {b}: a loc that is no slot of the request"
        pairs = set(zip(entries[valid].tolist(), output[valid].tolist(), strict=True))
        assert len(pairs) == len(set(entries[valid].tolist())), f"row {b}: a token has two locs"
        assert len(pairs) == len(set(output[valid].tolist())), f"row {b}: two tokens share a loc"

        tokens = self.after["device_buffer_tokens"][rid, : self.hot]
        filled = np.flatnonzero(self.before["device_buffer_tokens"][rid, : self.hot] != tokens)
        order = self.after["lru_slots"][rid, : self.hot]
        assert np.array_equal(np.sort(order), np.arange(self.hot)), f"row {b}: lru_slots is no permutation"
        if seq_len > self.hot:
            held = tokens[(tokens >= 0) & (tokens < seq_len)]
            assert len(np.unique(held)) == len(held), f"row {b}: a token is in two slots"
            asked = np.unique(entries[valid & (entries < seq_len - 1)])
            assert np.isin(asked, held).all(), f"row {b}: a token that was asked for is in no slot"
            assert np.isin(tokens[filled], asked).all(), f"row {b}: a slot holds a token that nobody asked for"
        else:
            assert len(filled) == 0, f"row {b}: a short sequence filled slots {filled}"

        newest = output[valid & (entries == seq_len - 1)]
        assert not np.isin(newest, locs[filled]).any(), f"row {b}: the newest token was copied"
        if not self.skip_io:
            fetched = np.flatnonzero(valid)
            sources = self.before["host_cache_locs"][rid, entries[fetched]]
            wrong = (self.device_items[output[fetched]] != self.host_items[sources]).any(axis=1)
            assert not wrong.any(), f"row {b}: wrong bytes for entries {fetched[wrong]}"
        if self.records:
            self.check_plan(b, rid, tokens, locs, filled)
        return filled

    def check_plan(self, b: int, rid: int, tokens: np.ndarray, locs: np.ndarray, filled: np.ndarray) -> None:
        count = int(self.after["miss_count"][b])
        assert count == len(filled), f"row {b}: {count} misses recorded, {len(filled)} slots filled"
        planned = self.after["miss_dst"][b, :count]
        assert np.array_equal(np.sort(planned), np.sort(locs[filled])), f"row {b}: the plan names other slots"
        slot_of_loc = dict(zip(locs[: self.hot].tolist(), range(self.hot), strict=True))
        brought = tokens[[slot_of_loc[loc] for loc in planned.tolist()]]
        sources = self.before["host_cache_locs"][rid, brought]
        assert np.array_equal(self.after["miss_src"][b, :count], sources), f"row {b}: plan names the wrong host locs"
