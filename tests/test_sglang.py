"""hisparse.integrations.sglang in modules of sglang's release: called by sglang's names, on the CPU target."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch")
import sglang_release  # noqa: E402
import torch_op_cases  # noqa: E402
from places import make_place  # noqa: E402
from sglang_release import (  # noqa: E402
    COORDINATOR,
    FOLDER,
    HISPARSE,
    HOST_POOL,
    LATENT_HOST_POOL,
    MEMORY_POOL,
    PLUGINS,
    ROOT,
    SLOT_MAPPING,
    Compiled,
    beside,
    write_kernel_package,
    write_metadata,
)

import hisparse  # noqa: E402
from hisparse import kvcacheio, torch_ops  # noqa: E402, F401
from hisparse.integrations import sglang  # noqa: E402

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="python ci/setup_sglang.py gets sglang's release")

SWAP_IN = "load_cache_to_device_buffer_mla"
LATENT = "transfer_kv_all_layer_mla"
KVCACHEIO = "sgl_kernel.kvcacheio"


@pytest.fixture
def release(tmp_path, monkeypatch):
    if torch.version.cuda and "cuda" not in hisparse.build_info()["targets"]:
        monkeypatch.setattr(torch.version, "cuda", None)  # the tests of targets are apart
    write_kernel_package(tmp_path, "0.4.10")
    with beside(tmp_path):
        yield tmp_path
        sglang.uninstall()


def imported(*names: str) -> list[ModuleType]:
    return [importlib.import_module(name) for name in names]


def is_ours(function, name: str) -> bool:
    own = getattr(kvcacheio, name, None) or getattr(hisparse, name)
    return function is not own and function.__code__ is own.__code__


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


def needs(name: str):
    return pytest.mark.skipif(not hasattr(hisparse, name), reason=f"hisparse has no {name}")


@needs("copy_cache_planned_mla")
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


@needs("load_blocks_to_device_buffer_mha")
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


def test_every_name_of_modules_that_were_imported_before(release):
    mine = ModuleType("mine")
    sys.modules["mine"] = mine
    exec(
        f"from {HISPARSE} import {SWAP_IN} as swap_in\n"
        f"import {HISPARSE} as ops\n"
        f"class Engine:\n    run = ops.{SWAP_IN}\n    start = staticmethod(ops.{SWAP_IN})\n",
        vars(mine),
    )
    modules = imported(COORDINATOR, MEMORY_POOL, HOST_POOL, LATENT_HOST_POOL, HISPARSE, KVCACHEIO)
    original = {module: dict(vars(module)) for module in (*modules, mine)}
    held = functools.partial(mine.swap_in)
    try:
        report = sglang.install()
        assert is_ours(mine.swap_in, SWAP_IN)
        assert mine.Engine.run is mine.Engine.start is mine.Engine().start is mine.swap_in
        assert {f"{COORDINATOR}.{SWAP_IN}", "mine.swap_in", "mine.Engine.run", "mine.Engine.start"} <= set(
            report[SWAP_IN].places
        )
        assert sys.modules["sgl_kernel"].transfer_kv_all_layer_mla is modules[1].transfer_kv_all_layer_mla
        assert {place.rpartition(".")[0] for place in report[LATENT].places} == {
            "sgl_kernel", KVCACHEIO, MEMORY_POOL, HOST_POOL, LATENT_HOST_POOL
        }  # fmt: skip
        for name in report.names("replaced"):
            for module in modules:
                assert name not in vars(module) or is_ours(getattr(module, name), name), (module, name)
        with pytest.raises(Compiled):  # what holds sglang's function in another way keeps it
            held(*[torch.zeros(1, 4, dtype=torch.int32)] * 10, 4, 4, 4)

        sglang.uninstall()
        for module, names in original.items():
            assert {name: vars(module)[name] for name in names} == names
        assert mine.Engine.run is mine.Engine.start is mine.swap_in
        assert isinstance(vars(mine.Engine)["start"], staticmethod)
        with pytest.raises(Compiled, match="sparse_cache"):
            mine.swap_in(*[torch.zeros(1, 4, dtype=torch.int32)] * 10, 4, 4, 4)
    finally:
        del sys.modules["mine"]


def test_modules_that_are_imported_later(release):
    report = sglang.install()
    assert not {"sglang", "sgl_kernel"} & sys.modules.keys()
    assert report[SWAP_IN].state == report[LATENT].state == "waiting" and HISPARSE in report[SWAP_IN].reason
    coordinator, pools = imported(COORDINATOR, MEMORY_POOL)
    assert is_ours(coordinator.load_cache_to_device_buffer_mla, SWAP_IN)
    assert is_ours(pools.transfer_kv_all_layer_mla, LATENT)
    assert is_ours(sys.modules["sgl_kernel"].transfer_kv_all_layer_mla, LATENT)
    assert sglang.report()[SWAP_IN].places == (f"{HISPARSE}.{SWAP_IN}",)
    sglang.uninstall()
    for function in (coordinator.load_cache_to_device_buffer_mla, getattr(sys.modules[HISPARSE], SWAP_IN)):
        assert function.__module__ == HISPARSE


def test_imports_after_uninstall_are_sglangs(release):
    finders = list(sys.meta_path)
    sglang.install()
    sglang.uninstall()
    assert sys.meta_path == finders
    (module,) = imported(HISPARSE)
    assert getattr(module, SWAP_IN).__module__ == HISPARSE


def test_a_module_that_is_loaded_again(release):
    sglang.install()
    coordinator, module = imported(COORDINATOR, HISPARSE)
    before = getattr(module, SWAP_IN)
    importlib.reload(module)
    assert getattr(module, SWAP_IN) is before is coordinator.load_cache_to_device_buffer_mla
    sglang.uninstall()
    assert getattr(module, SWAP_IN) is coordinator.load_cache_to_device_buffer_mla
    assert getattr(module, SWAP_IN).__module__ == HISPARSE


def test_install_again_takes_more_ops_and_finds_new_names(release):
    module, coordinator = imported(HISPARSE, COORDINATOR)
    original = getattr(module, SWAP_IN)
    report = sglang.install([SWAP_IN])
    assert report.names("replaced") == [SWAP_IN]
    assert report[LATENT].reason == "not installed"
    coordinator.kept_elsewhere = original
    assert sglang.install([LATENT]).names("waiting") == []
    report = sglang.report()
    assert set(report.names("replaced")) == {SWAP_IN, LATENT}
    assert is_ours(coordinator.kept_elsewhere, SWAP_IN)
    assert report[SWAP_IN].places[-1] == f"{COORDINATOR}.kept_elsewhere"
    with pytest.raises(ValueError, match="ops: expected names among load_.*, got 'transfer_everything'"):
        sglang.install(["transfer_everything"])


def test_our_own_names_are_left_alone(release):
    """A module that took the op from hisparse keeps it when sglang's are put back."""
    imported(HISPARSE)
    mine = ModuleType("mine")
    mine.swap_in = hisparse.load_cache_to_device_buffer_mla
    sys.modules["mine"] = mine
    try:
        sglang.install()
        sglang.uninstall()
        assert mine.swap_in is hisparse.load_cache_to_device_buffer_mla
    finally:
        del sys.modules["mine"]


def test_what_hisparse_lacks_stays_sglangs(release):
    imported(*sglang.FUNCTIONS)
    report = sglang.install()
    for op in report.ops:
        own = getattr(kvcacheio if op.module == KVCACHEIO else hisparse, op.name, None)
        assert (op.state == "left") == (own is None), op
        if own is None:
            assert op.reason == f"hisparse {hisparse.__version__} has no such op"
            assert getattr(sys.modules[op.module], op.name).__module__ == op.module
    assert report["load_cache_to_device_buffer_spec_mla"].state == "left"
    assert len(report.ops) == sum(map(len, sglang.FUNCTIONS.values()))


def test_sglangs_functions_are_all_known():
    """The release has no hot-buffer op and no slot mapping that the table of functions leaves out."""
    for name in (HISPARSE, SLOT_MAPPING):
        source = FOLDER.joinpath(*name.split(".")).with_suffix(".py").read_text()
        defined = [line[4:].partition("(")[0] for line in source.splitlines() if line.startswith("def ")]
        assert {function for function in defined if not function.startswith("_")} == set(sglang.FUNCTIONS[name])
    version = importlib.metadata.Distribution.at(next(FOLDER.glob("sglang-*.dist-info"))).version
    assert version in sglang.TESTED["sglang"]


def test_releases(tmp_path):
    write_kernel_package(tmp_path, "0.5.0")
    with beside(tmp_path):
        imported(KVCACHEIO, HISPARSE)
        report = sglang.install()
        assert report[SWAP_IN].state == "replaced"
        assert report[LATENT].reason == "sglang-kernel is 0.5.0, tested are 0.4.10 (any_version=True takes it)"
        assert sglang.install(any_version=True)[LATENT].state == "replaced"
        sglang.uninstall()


def test_what_is_in_place_stays(release, monkeypatch):
    """Even where a later call would leave it: uninstall has to find it."""
    (module,) = imported(HISPARSE)
    sglang.install()
    monkeypatch.setitem(sglang.TESTED, "sglang", ())
    assert sglang.install()[SWAP_IN].state == "replaced"
    sglang.uninstall()
    assert getattr(module, SWAP_IN).__module__ == HISPARSE


def test_packages_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = sglang.install()
    assert report[SWAP_IN].reason == "sglang is not installed"
    assert report[LATENT].reason == "sgl_kernel is not installed"
    assert report.names("replaced") == report.names("waiting") == []
    sglang.uninstall()


def test_other_arguments(release, tmp_path):
    (tmp_path / "sgl_kernel" / "kvcacheio.py").write_text(
        inspect.cleandoc("""
        def transfer_kv_all_layer_mla(src_layers, dst_layers, indices, item_size, num_layers): pass
        def transfer_kv_direct(dst_layers, src_layers, src_indices, dst_indices, page_size): pass
        def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, block_quota=4): pass
        def transfer_kv_per_layer(*arguments): pass
        def get_device_accessible_ptr(tensor): pass
        def transfer_embedding_ranges_direct(src, dst, src_starts, dst_starts, lengths): pass
        """)
    )
    report = sglang.install()
    assert report[LATENT].state == "waiting"
    (module,) = imported(KVCACHEIO)
    report = sglang.report()
    reasons = {op.name: op.reason for op in report.ops if op.module == KVCACHEIO}
    assert reasons[LATENT] == "its argument indices is none of ours"
    assert reasons["transfer_kv_direct"] == "its argument dst_layers has another place"
    assert reasons["transfer_kv_per_layer_mla"] == "" and report["transfer_kv_per_layer_mla"].state == "replaced"
    assert reasons["transfer_kv_per_layer"] == "its argument arguments is none of ours"
    assert reasons["get_device_accessible_ptr"] == "hisparse needs an argument device_index"
    assert reasons["transfer_kv_all_layer"] == "this release has no such function"
    assert report["transfer_embedding_ranges_direct"].state == "replaced"
    assert getattr(module, LATENT).__module__ == KVCACHEIO


def test_default_values():
    def theirs(src, dst, src_indices, dst_indices, item_size_bytes, *, blocks=4):
        pass

    def ours(src, dst, src_indices, dst_indices, item_size_bytes, *, blocks=8):
        pass

    assert sglang.argument_reason(theirs, ours) == "its argument blocks is 4 by default, ours 8"
    assert sglang.argument_reason(theirs, hisparse.copy_items) is None  # None: chosen at the call
    assert sglang.argument_reason(hisparse._C.copy_items, ours) == "its arguments are not known"


def test_targets(release, monkeypatch):
    imported(HISPARSE)
    found = sglang.info.collect()
    monkeypatch.setattr(sglang.info, "collect", lambda: found)
    cuda = next(target for target in found["targets"] if target["target"] == "cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda.update(built=False, devices=[])
    assert sglang.install()[SWAP_IN].reason.startswith("torch is built for cuda, this hisparse for cpu")
    cuda.update(built=True, devices=[{"name": "Old", "arch": "sm_75", "covered_by": None}])
    assert sglang.install()[SWAP_IN].reason == "this hisparse has no code for Old (sm_75)"
    monkeypatch.setattr(torch.version, "xpu", "2025", raising=False)
    assert sglang.install()[SWAP_IN].reason == "torch is built for XPU"
    monkeypatch.setattr(torch.version, "xpu", None)
    cuda["devices"][0]["covered_by"] = "sm_90"
    assert sglang.install()[SWAP_IN].state == "replaced"


def test_report_as_text(release):
    (module,) = imported(HISPARSE)
    module.other_name = getattr(module, SWAP_IN)
    lines = str(sglang.install()).splitlines()
    count = len(sglang.report().names("replaced"))
    assert lines[0] == f"hisparse {hisparse.__version__} in sglang: {count} of 23 ops"
    assert lines[1:3] == [HISPARSE, f"  {SWAP_IN}: replaced, names: 2"]
    assert f"  {LATENT}: waiting, {KVCACHEIO} is not imported yet" in lines
    assert len(lines) == 1 + 3 + 23


def test_compiled_regions_take_replaced_names(release, monkeypatch):
    """torch.compile sees the operator behind sglang's name."""
    monkeypatch.setattr(sglang_release, "OTHERS", ())  # torch's compiler looks for triton
    (module,) = imported(KVCACHEIO)
    sglang.install()
    src, indices = torch.arange(24, dtype=torch.uint8).view(6, 4), torch.tensor([5, 2])
    dst = torch.zeros_like(src)
    compiled = torch.compile(lambda *a: module.transfer_kv_per_layer_mla(*a, 4), fullgraph=True, backend="eager")
    compiled(src, dst, indices, indices.flip(0))
    assert torch.equal(dst[[2, 5]], src[[5, 2]])


class TestPlugin:
    """sglang's own loader of plugins calls our entry point."""

    @pytest.fixture(autouse=True)
    def entry_point(self, release):
        write_metadata(release, "hisparse-entry", "1.0")
        information = release / "hisparse_entry-1.0.dist-info"
        (information / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nhisparse = hisparse.integrations.sglang:plugin\n"
        )
        (plugins,) = imported(PLUGINS)
        plugins.envs.SGLANG_PLUGINS = plugins.envs.SGLANG_PLATFORM = SimpleNamespace(get=lambda: "")
        self.load, self.plugins = plugins.load_plugins, plugins
        yield
        plugins.HookRegistry.reset()

    def test_all(self, monkeypatch, caplog):
        monkeypatch.delenv("HISPARSE_SGLANG", raising=False)
        (coordinator,) = imported(COORDINATOR)
        with caplog.at_level(logging.INFO, "hisparse"):
            self.load()
        assert is_ours(coordinator.load_cache_to_device_buffer_mla, SWAP_IN)
        assert f"{SWAP_IN}: replaced" in caplog.text

    @pytest.mark.parametrize("value", ["none", f" {SWAP_IN} , {LATENT} ", ""])
    def test_chosen(self, monkeypatch, caplog, value):
        monkeypatch.setenv("HISPARSE_SGLANG", value)
        imported(COORDINATOR, KVCACHEIO)
        self.load()
        replaced = sglang.report().names("replaced")
        assert len(replaced) > 2 if value == "" else set(replaced) == set(value.replace(" ", "").split(",")) - {"none"}
        assert "Failed" not in caplog.text

    def test_an_unknown_name_stops_the_plugin_and_not_the_server(self, monkeypatch, caplog):
        monkeypatch.setenv("HISPARSE_SGLANG", "swap_in")
        self.load()
        assert "HISPARSE_SGLANG: ops: expected names among" in caplog.text
        assert sglang.report().names("replaced") == []

    def test_hooks_of_other_plugins_wrap_ours(self, monkeypatch):
        monkeypatch.delenv("HISPARSE_SGLANG", raising=False)
        (coordinator,) = imported(COORDINATOR)
        calls = []

        def around(function, *arguments, **options):
            calls.append(function)

        self.plugins.HookRegistry.register(
            f"{HISPARSE}.{SWAP_IN}", around, importlib.import_module(f"{PLUGINS}.hook_registry").HookType.AROUND
        )
        self.load()
        coordinator.load_cache_to_device_buffer_mla()
        assert len(calls) == 1 and is_ours(calls[0], SWAP_IN)

    def test_ours_is_the_projects_entry_point(self):
        from setuptools.config.pyprojecttoml import read_configuration

        project = read_configuration(str(ROOT / "pyproject.toml"), expand=False)["project"]
        assert project["entry-points"] == {"sglang.srt.plugins": {"hisparse": "hisparse.integrations.sglang:plugin"}}
