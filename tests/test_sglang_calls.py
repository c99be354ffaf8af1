"""Calls of hisparse's ops by sglang's names: by its coordinator and host pools as its release has them, on the CPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch")
import sglang_release  # noqa: E402
import torch_op_cases  # noqa: E402
from places import make_place  # noqa: E402
from sglang_release import COORDINATOR, LATENT_HOST_POOL, imported  # noqa: E402

from hisparse.integrations import sglang  # noqa: E402

pytestmark = sglang_release.NEEDED

SWAP_IN = "load_cache_to_device_buffer_mla"


def decode_state(rng, layers=2, requests=5, top_k=16, hot=32, page=4, length=150, item=40) -> SimpleNamespace:
    """What sglang's HiSparseCoordinator holds, on the CPU, with the pools shuffled and the LRU in any order."""
    host_rows, device_rows = requests * length + 9, requests * (hot + page) + 5
    locs = np.stack([rng.permutation(device_rows)[: requests * (hot + page)] for _ in range(layers)])
    return SimpleNamespace(
        top_k=top_k,
        device_buffer_size=hot,
        item_size_bytes=item,
        swap_in_block_size=960,
        is_dsv4_hisparse=False,
        skip_io=False,
        spec_swap=None,
        num_real_reqs=torch.zeros(1, dtype=torch.int32),
        req_device_buffer_tokens=torch.full((layers, requests, hot + page), -1, dtype=torch.int32),
        req_device_buffer_token_locs=torch.from_numpy(locs.reshape(layers, requests, hot + page).astype(np.int32)),
        req_to_host_pool=torch.from_numpy(rng.permutation(host_rows)[: requests * length].reshape(requests, length)),
        lru_slots=torch.from_numpy(
            rng.permuted(np.tile(np.arange(hot, dtype=np.int16), (layers, requests, 1)), axis=2)
        ),
        top_k_device_locs_buffer=torch.full((requests, top_k + 3), 123456, dtype=torch.int32),
        mem_pool_host=SimpleNamespace(
            kv_buffer=[torch.from_numpy(rng.integers(0, 256, (host_rows, 1, item), np.uint8)) for _ in range(layers)]
        ),
        mem_pool_device=SimpleNamespace(
            kv_buffer=[torch.from_numpy(rng.integers(0, 256, (device_rows, 1, item), np.uint8)) for _ in range(layers)]
        ),
        _miss_src=torch.zeros(requests, top_k, dtype=torch.int64),
        _miss_dst=torch.zeros(requests, top_k, dtype=torch.int32),
        _miss_count=torch.zeros(requests, dtype=torch.int32),
    )


def test_decode_steps_of_the_coordinator(release, rng):
    """sglang's own method makes the calls; the reference gets the arrays as numpy."""
    (coordinator,) = imported(COORDINATOR)
    assert sglang.install()[SWAP_IN].state == "replaced"
    swap_in = coordinator.HiSparseCoordinator._run_swap_in_kernel
    state = decode_state(rng)
    requests, length, hot = 5, 150, state.device_buffer_size
    state.req_device_buffer_tokens[:, :, :hot] = torch.arange(hot, dtype=torch.int32)
    for step in range(6):
        batch = int(rng.integers(1, requests + 1))
        rids = rng.permutation(requests)[:batch]
        lengths = np.where(rng.random(batch) < 0.2, rng.integers(1, hot), length - 6 + step).astype(np.int32)
        top_k = np.stack([rng.permutation(length + 2)[: state.top_k] - 1 for _ in range(batch)]).astype(np.int32)
        state.num_real_reqs[0] = batch - (step == 3)
        for layer in range(2):
            expected = {
                "top_k_tokens": top_k,
                "device_buffer_tokens": state.req_device_buffer_tokens[layer],
                "host_cache_locs": state.req_to_host_pool,
                "device_buffer_locs": state.req_device_buffer_token_locs[layer],
                "host_cache": state.mem_pool_host.kv_buffer[layer],
                "device_buffer": state.mem_pool_device.kv_buffer[layer],
                "top_k_device_locs": state.top_k_device_locs_buffer[:batch],
                "req_pool_indices": rids,
                "seq_lens": lengths,
                "lru_slots": state.lru_slots[layer],
                "num_real_reqs": state.num_real_reqs,
                "miss_src": state._miss_src[:batch],
                "miss_dst": state._miss_dst[:batch],
                "miss_count": state._miss_count[:batch],
            }
            theirs = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
            expected = {
                name: np.array(getattr(value, "numpy", lambda value=value: value)()) for name, value in expected.items()
            }
            for pool in ("host_cache", "device_buffer"):
                expected[pool] = expected[pool].reshape(-1, state.item_size_bytes)
            sizes = {"item_size_bytes": state.item_size_bytes, "num_top_k": state.top_k, "hot_buffer_size": hot}
            reference.load_cache_to_device_buffer_mla(**expected, **sizes)
            out = swap_in(
                state, torch.from_numpy(rids), torch.from_numpy(lengths), torch.from_numpy(top_k), layer, True
            )
            assert np.array_equal(out.numpy(), expected["top_k_device_locs"][:, : state.top_k])
            for name in ("device_buffer_tokens", "lru_slots", "device_buffer", "top_k_device_locs", "miss_count"):
                assert np.array_equal(theirs[name].numpy().ravel(), expected[name].ravel()), name
            for row, count in enumerate(expected["miss_count"][: state.num_real_reqs[0]]):
                for name in ("miss_src", "miss_dst"):
                    assert np.array_equal(theirs[name][row, :count].numpy(), expected[name][row, :count])


def test_planned_copies_of_the_coordinator(release, rng):
    """The anchor layer's swap-in records its plan; another layer's copy replays it."""
    (coordinator,) = imported(COORDINATOR)
    sglang.install()
    state, batch = decode_state(rng), 4
    state._prefetch_copy_blocks, state.num_real_reqs[0] = 4, batch - 1
    rids, lengths = torch.from_numpy(rng.permutation(5)[:batch]), torch.full((batch,), 150)
    top_k = torch.from_numpy(np.stack([rng.permutation(149)[: state.top_k] for _ in range(batch)]).astype(np.int32))
    before = state.mem_pool_device.kv_buffer[1].clone()
    coordinator.HiSparseCoordinator._run_swap_in_kernel(state, rids, lengths, top_k, 0, True)
    coordinator.HiSparseCoordinator._run_copy_only_kernel(state, batch, 1)
    for row in range(batch - 1):
        src, dst = state._miss_src[row, : state.top_k].long(), state._miss_dst[row, : state.top_k].long()
        assert state._miss_count[row] == state.top_k
        before[dst] = state.mem_pool_host.kv_buffer[1][src]
    assert torch.equal(state.mem_pool_device.kv_buffer[1], before)


def test_blocks_of_the_coordinator(release, rng):
    """Keys and values of every selected token are where the coordinator's result says."""
    (coordinator,) = imported(COORDINATOR)
    sglang.install()
    state, other = decode_state(rng), decode_state(rng)
    state.is_m3_hisparse, state.mem_pool_device.start_layer = True, 30
    state.mem_pool_host.k_buffer, state.mem_pool_host.v_buffer = (s.mem_pool_host.kv_buffer for s in (state, other))
    pools = [s.mem_pool_device.kv_buffer for s in (state, other)]
    state.mem_pool_device.get_key_buffer = lambda layer: pools[0][layer - 30]
    state.mem_pool_device.get_value_buffer = lambda layer: pools[1][layer - 30]
    rids, lengths = torch.tensor([3, 0]), torch.tensor([149, 149])
    blocks = torch.tensor([[5, 0, 17, 20], [36, -1, 2, 9]], dtype=torch.int32)
    state.num_real_reqs[0] = 2
    locs = coordinator.HiSparseCoordinator.swap_in_selected_blocks(state, rids, lengths, blocks, 31, 4)
    newest_and_padding = {148, *range(-4, 0)}
    for row, rid in enumerate(rids.tolist()):
        tokens = [4 * block + n for block in blocks[row].tolist() for n in range(4)]
        for token, loc in zip(tokens, locs[row].tolist(), strict=True):
            if token in newest_and_padding or token > 148:
                assert (loc >= 0) == (token == 148)
                continue
            source = state.req_to_host_pool[rid, token]
            for pool, host in zip(pools, (state, other), strict=True):
                assert torch.equal(pool[1][loc], host.mem_pool_host.kv_buffer[1][source])


@pytest.mark.parametrize("name", [name for name in torch_op_cases.MAKERS if name != "copy_items"])
def test_sglangs_names_do_what_ours_do(release, name):
    module = next(module for module, names in sglang.FUNCTIONS.items() if name in names)
    (module,) = imported(module)
    theirs, ours = (torch_op_cases.make_sample(name, make_place("cpu64-wave-torch")) for _ in range(2))
    upstream = inspect.signature(getattr(module, name)).parameters
    assert theirs.arguments.keys() <= upstream.keys()
    assert sglang.install()[name].state == "replaced"
    got, expected = theirs.call(getattr(module, name)), ours.call(ours.function)
    assert got is expected is None or torch.equal(got, expected)
    written, wanted = theirs.fetch(), ours.fetch()
    for part in written:
        assert written[part] == wanted[part] or "ptrs" in part or part.endswith(" table"), part


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_host_pool_of_latent_caches(release, rng, layout):
    """Pages to the host and back to other places, by the methods of sglang's host pool."""
    (pools,) = imported(LATENT_HOST_POOL)
    sglang.install()
    layers, page, pages, item = 3, 4, 6, 48
    tokens = page * pages
    device = [torch.from_numpy(rng.integers(0, 256, (tokens, 1, item), np.uint8)) for _ in range(layers)]
    direct = layout == "page_first_direct"
    shape = (layers, tokens, 1, item) if layout == "layer_first" else (tokens, layers, 1, item)
    host = torch.zeros((pages, layers, page, 1, item) if direct else shape, dtype=torch.uint8)

    def table(tensors):
        return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)

    pool = SimpleNamespace(
        _is_dummy=False,
        _target_layer_indices=range(layers),
        _host_layer_by_controller=range(layers),
        _buffer_index_by_layer=range(layers),
        _require_packed_device_rows=lambda name: None,
        _layer_shard_enabled=False,
        draft_layer_num=0,
        dcp_size=1,
        dcp_rank=0,
        layout=layout,
        page_size=page,
        layer_num=layers,
        can_use_jit=False,
        can_use_write_back_jit=False,
        token_stride_size=item,
        layout_dim=item * layers,
        kv_buffer=host,
        data_refs=list(host),
        data_ptrs=table(host),
        device_kv_buffers=device,
        device_data_ptrs=table(device),
    )
    backend = "direct" if direct else "kernel"
    out, there = (np.arange(page) + page * rng.permutation(pages)[:3, None] for _ in range(2))
    out, there = torch.from_numpy(out.ravel()), torch.from_numpy(there.ravel())
    before = [tensor.clone() for tensor in device]
    pools.MLATokenToKVPoolHost.backup_from_device_all_layer(pool, None, there, out, backend)
    back = out.view(-1, page).flip(0).ravel()
    for layer in range(layers):
        pools.MLATokenToKVPoolHost.load_to_device_per_layer(pool, None, there, back, layer, backend)
        expected = before[layer].clone()
        expected[back] = before[layer][out]
        assert torch.equal(device[layer], expected)
