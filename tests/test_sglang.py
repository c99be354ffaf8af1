"""hisparse.integrations.sglang in modules of sglang's release: what is replaced, when, why not, and put back."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import sglang_release  # noqa: E402
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
    imported,
    write_kernel_package,
    write_metadata,
)

import hisparse  # noqa: E402
from hisparse import kvcacheio, torch_ops  # noqa: E402, F401
from hisparse.integrations import sglang  # noqa: E402

pytestmark = sglang_release.NEEDED

SWAP_IN = "load_cache_to_device_buffer_mla"
LATENT = "transfer_kv_all_layer_mla"
KVCACHEIO = "sgl_kernel.kvcacheio"


def is_ours(function, name: str) -> bool:
    own = getattr(kvcacheio, name, None) or getattr(hisparse, name)
    return function is not own and function.__code__ is own.__code__


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
