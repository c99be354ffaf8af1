"""torch.ops.hisparse: every op under torch.compile and torch.export, by the name that users call it by."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
import reference
from places import make_place
from torch_op_cases import BY_TABLE, DIRECT_OPS, MAKERS, make_sample

import hisparse
from hisparse import _C, kvcacheio

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from hisparse import torch_ops  # noqa: E402

OPS = {function.__name__: function for function in torch_ops.WRITES}
NO_OPERATOR = {"get_device_accessible_ptr", "register_host_memory"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["cpu64-wave-torch", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request):
    return make_place(request.param)


@pytest.fixture(params=MAKERS)
def name(request, where):
    if request.param == "copy_all_layer_kv_cache_cpu" and where.warp_size is None:
        pytest.skip("an op for the CPU")
    return request.param


def module_of(sample) -> torch.nn.Module:
    class Region(torch.nn.Module):
        def forward(self, arguments):
            return sample.function(**arguments)

    return Region()


def check_call(name, where, function) -> None:
    """`function` does to one sample what the op itself does to another of the same bytes."""
    ours, theirs = make_sample(name, where), make_sample(name, where)
    before = ours.fetch()
    expected = ours.call(ours.function)
    got = theirs.call(function)
    assert got is expected is None or torch.equal(got, expected) and got.dtype is expected.dtype
    assert (ours.fetch() != before) == bool(torch_ops.WRITES[ours.function])
    got, expected = theirs.fetch(), ours.fetch()
    for part in expected.keys() - address_tables(expected):
        assert got[part] == expected[part], part


def address_tables(parts) -> set[str]:
    return {part for part in parts if part.endswith(" table") or part in ("data_ptrs", "src_ptrs", "dst_ptrs")}


def test_every_op_is_an_operator():
    public = {name for name in hisparse.__all__ if inspect.isfunction(getattr(hisparse, name))} & vars(_C).keys()
    public |= {name for name, value in vars(kvcacheio).items() if inspect.isfunction(value)}
    assert public - NO_OPERATOR == set(OPS) == set(MAKERS)


def test_schemas():
    """The names, order and defaults of the function, and what is written."""
    schemas = {name: str(getattr(torch.ops.hisparse, name).default._schema) for name in OPS}
    assert schemas["copy_items"] == (
        "hisparse::copy_items(Tensor src, Tensor(a0!) dst, Tensor src_indices, Tensor dst_indices, "
        "SymInt item_size_bytes, *, SymInt? blocks=None) -> ()"
    )
    for name, function in OPS.items():
        arguments = getattr(torch.ops.hisparse, name).default._schema.arguments
        parameters = inspect.signature(function).parameters.values()
        assert [(a.name, a.kwarg_only) for a in arguments] == [
            (p.name, p.kind is p.KEYWORD_ONLY) for p in parameters
        ], name
        for argument, parameter in zip(arguments, parameters, strict=True):
            if parameter.default is not parameter.empty:
                assert argument.has_default_value() and argument.default_value == parameter.default


def test_marks_are_what_an_op_writes(name, where):
    sample = make_sample(name, where)
    before = sample.fetch()
    sample.call(sample.function)
    after = sample.fetch()
    changed = {part.partition("[")[0] for part in before if before[part] != after[part]}
    if name in BY_TABLE:
        layer_of = {"data_ptrs": "layer", "dst_ptrs": "dst"}
        changed = {table for table in torch_ops.WRITES[OPS[name]] if layer_of.get(table, table) in changed}
    assert changed == set(torch_ops.WRITES[OPS[name]])


def test_opcheck(name, where):
    sample = make_sample(name, where)
    if where.warp_size is None:  # what opcheck copies it does not pin
        sample.arguments = {n: a.cuda() if isinstance(a, torch.Tensor) else a for n, a in sample.arguments.items()}
        if name in DIRECT_OPS or "embedding" in name:
            pytest.skip("host memory on one side")
    with where.options():
        torch.library.opcheck(getattr(torch.ops.hisparse, name).default, (), sample.arguments)


def test_operator(name, where):
    check_call(name, where, getattr(torch.ops.hisparse, name))


def test_compile(name, where):
    function = OPS[name]

    def region(**arguments):
        return function(**arguments)

    check_call(name, where, torch.compile(region, fullgraph=True, backend="aot_eager"))


@pytest.mark.parametrize("strict", [True, False])
def test_export(name, where, strict):
    sample = make_sample(name, where)
    before = sample.fetch()
    program = torch.export.export(module_of(sample), (sample.arguments,), strict=strict)
    assert sample.fetch() == before
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(getattr(torch.ops.hisparse, name).default) == 1, program.graph
    check_call(name, where, lambda **arguments: program.module()(arguments))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["copy_items", "translate_padded_hisparse_locations"])
def test_export_of_tensors_that_never_had_memory(name, device):
    """Of a GPU too, whether there is one or not."""
    sample = make_sample(name, make_place("cpu64-wave-torch"))
    with FakeTensorMode():
        sample.arguments = {
            n: torch.empty(a.shape, dtype=a.dtype, device=device) if isinstance(a, torch.Tensor) else a
            for n, a in sample.arguments.items()
        }
    graph = torch.export.export(module_of(sample), (sample.arguments,), strict=False).graph
    (call,) = (node for node in graph.nodes if node.op == "call_function")
    assert call.target is getattr(torch.ops.hisparse, name).default
    if name == "translate_padded_hisparse_locations":
        answer = call.meta["val"]
        assert (answer.shape, answer.dtype, answer.device.type) == ((5,), torch.int64, device)


def test_names_that_were_imported_before_and_copies_of_functions():
    """`from hisparse import f`, and a function of the same code, as other packages' names for ours may be."""
    from types import FunctionType

    from hisparse import copy_items

    copied = FunctionType(copy_items.__code__, copy_items.__globals__, "copied", copy_items.__defaults__)
    copied.__kwdefaults__ = copy_items.__kwdefaults__
    where = make_place("cpu64-wave-torch")
    for function in (copy_items, copied):
        region = torch.compile(lambda f=function, **arguments: f(**arguments), fullgraph=True, backend="eager")
        check_call("copy_items", where, region)


TOP_K, HOT, LENGTH, ITEM, REQUESTS = 6, 12, 60, 16, 4


class DecodeStep(torch.nn.Module):
    """Two layers: selection, swap-in, and what attention would read, on which the next selection depends."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, scores, requests, lengths):
        read = []
        for layer in range(2):
            selected = torch.topk(scores[layer], TOP_K).indices.to(torch.int32)
            locs = torch.empty_like(selected)
            hisparse.load_cache_to_device_buffer_mla(
                selected,
                self.state["slot_tokens"][layer],
                self.state["host_locs"],
                self.state["slot_locs"],
                self.state["host"][layer],
                self.state["device"][layer],
                locs,
                requests,
                lengths,
                self.state["lru"][layer],
                ITEM,
                TOP_K,
                HOT,
            )
            read.append(self.state["device"][layer][locs.long()])
            scores = scores * (1 + read[-1].sum(dim=(1, 2))[None, :, None])
        return torch.stack(read)


def decode_state(device: str, one_tensor: bool) -> dict:
    """Pools and tables of both layers, as views of one tensor each or as tensors of their own."""
    generator = torch.Generator().manual_seed(3)
    rows = REQUESTS * (HOT + 1)
    host = torch.randint(0, 256, (2, REQUESTS * LENGTH, ITEM), dtype=torch.uint8, generator=generator)
    layers = {
        "slot_tokens": torch.full((2, REQUESTS, HOT + 1), -1, dtype=torch.int32, device=device),
        "host": host if device == "cpu" else host.pin_memory(),
        "device": torch.zeros(2, rows, ITEM, dtype=torch.uint8, device=device),
        "lru": torch.arange(HOT, dtype=torch.int16, device=device).repeat(2, REQUESTS, 1),
    }
    if not one_tensor:
        layers = {
            name: [layer.clone() if name != "host" or device == "cpu" else layer.clone().pin_memory() for layer in both]
            for name, both in layers.items()
        }
    return layers | {
        "host_locs": torch.arange(REQUESTS * LENGTH, device=device).view(REQUESTS, LENGTH),
        "slot_locs": torch.arange(rows, dtype=torch.int32, device=device).view(REQUESTS, HOT + 1),
    }


def same_state(state, expected) -> bool:
    return all(torch.equal(a, b) for name in state for a, b in zip(state[name], expected[name], strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("one_tensor", [False, True], ids=["tensor-per-layer", "one-tensor"])
def test_decode_steps_in_inductor(device, dynamic, one_tensor, monkeypatch):
    """Steps of several batches: equal to eager and to the items on the host, and the op gets the pools, no copies."""
    states = [decode_state(device, one_tensor) for _ in range(2)]
    step = torch.compile(DecodeStep(states[1]), fullgraph=True, dynamic=dynamic)
    places = [
        {states[1][name][layer].data_ptr() for name in ("slot_tokens", "host", "device", "lru")} for layer in (0, 1)
    ]
    seen = []
    direct = hisparse._C.load_cache_to_device_buffer_mla

    def spy(*arguments):
        seen.append({arguments[n].data_ptr() for n in (1, 4, 5, 9)})
        direct(*arguments)

    generator = torch.Generator().manual_seed(4)
    for batch in (2, 3, 4, 2):
        scores = torch.rand(2, batch, LENGTH - 1, generator=generator).to(device)
        requests = torch.randperm(REQUESTS, generator=generator)[:batch].to(device)
        lengths = torch.full((batch,), LENGTH, device=device)
        expected = DecodeStep(states[0])(scores, requests, lengths)
        with monkeypatch.context() as patch:
            patch.setattr(hisparse.swap_in._C, "load_cache_to_device_buffer_mla", spy)
            got = step(scores, requests, lengths)
        assert torch.equal(got, expected)
        assert same_state(states[1], states[0])
        first = (requests[:, None] * LENGTH + torch.topk(scores[0], TOP_K).indices).cpu()
        assert torch.equal(got[0].cpu(), states[1]["host"][0][first])
    assert seen == places * 4


def test_a_view_at_an_unknown_place_is_refused_when_it_is_traced():
    """Inductor would write to the start of the tensor."""

    def region(pool, rows, start, indices):
        hisparse.copy_items(rows, pool[start * 2 :], indices, indices, 16)

    pool, rows = torch.zeros(12, 16, dtype=torch.uint8), torch.ones(2, 16, dtype=torch.uint8)
    with pytest.raises(Exception, match="dst: expected a view whose place in its tensor the compiler knows"):
        torch.compile(region, fullgraph=True, dynamic=True)(pool, rows, 3, torch.tensor([0, 1]))
    assert not pool.any()


@pytest.mark.gpu
def test_compiled_step_in_a_cuda_graph():
    """Captured once and replayed with other scores, as a serving engine does."""
    state, expected = decode_state("cuda", False), decode_state("cuda", False)
    step, eager = torch.compile(DecodeStep(state), fullgraph=True), DecodeStep(expected)
    scores = torch.rand(2, REQUESTS, LENGTH - 1, device="cuda")
    requests, lengths = torch.arange(REQUESTS, device="cuda"), torch.full((REQUESTS,), LENGTH, device="cuda")
    for run in (step, eager):
        run(scores, requests, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(scores, requests, lengths)
    for _ in range(3):
        scores.copy_(torch.rand_like(scores))
        graph.replay()
        assert torch.equal(out, eager(scores, requests, lengths))
    assert same_state(state, expected)


def test_swap_in_of_a_graph_equals_the_reference():
    where = make_place("cpu32-wave-torch")
    function = torch.compile(
        lambda **arguments: hisparse.load_cache_to_device_buffer_mla(**arguments), fullgraph=True, backend="aot_eager"
    )
    for seed in range(3):
        sample = make_sample("load_cache_to_device_buffer_mla", where, seed)
        sizes = {n: a for n, a in sample.arguments.items() if isinstance(a, int)}
        arrays = {n: a.numpy().copy() for n, a in sample.arguments.items() if isinstance(a, torch.Tensor)}
        reference.load_cache_to_device_buffer_mla(**arrays, **sizes)
        sample.call(function)
        for part in ("device_buffer_tokens", "device_buffer", "top_k_device_locs", "lru_slots", "miss_count"):
            assert np.array_equal(sample.arguments[part].numpy(), arrays[part]), part


def test_a_wrong_argument_is_an_error_when_the_graph_runs():
    compiled = torch.compile(lambda *a: hisparse.copy_items(*a, 24), fullgraph=True, backend="eager")
    pool, indices = torch.zeros(4, 24, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    compiled(pool, pool.clone(), indices, indices)
    with pytest.raises(TypeError, match="src_indices: expected .*int64"):
        compiled(pool, pool.clone(), indices.int(), indices)


def test_tensors_without_memory_are_traced_not_read():
    """Even empty ones, which a direct call would return from at once."""
    from torch.fx.experimental.proxy_tensor import make_fx

    pool, indices = torch.zeros(4, 24, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    for count in (0, 2):
        graph = make_fx(lambda *a: hisparse.copy_items(*a, 24, blocks=3), tracing_mode="fake")(
            pool, pool.clone(), indices.new_zeros(count), indices.new_zeros(count)
        )
        (call,) = (node for node in graph.graph.nodes if node.target is torch.ops.hisparse.copy_items.default)
        assert call.kwargs == {"blocks": 3}


def test_a_tensor_type_that_dispatches_gets_the_call():
    class Wrapper(torch.Tensor):
        calls: list = []

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            cls.calls.append(function)
            return function(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    pool, indices = torch.arange(4, dtype=torch.uint8).view(4, 1), torch.tensor([1])
    target = Wrapper(pool.flip(0))
    hisparse.copy_items(pool, target, indices, indices, 1)
    assert Wrapper.calls == [torch.ops.hisparse.copy_items.default]
    assert target.inner.tolist() == [[3], [1], [1], [0]]


def test_direct_calls_pass_the_dispatcher_by():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    sample = make_sample("copy_items", make_place("cpu64-wave-torch"))
    with Count() as count:
        sample.call(hisparse.copy_items)
        assert count.calls == 0
        sample.call(torch.ops.hisparse.copy_items)
        assert count.calls == 1


def test_import_of_the_package_loads_no_torch_and_no_compiler():
    code = (
        "import sys, hisparse; assert 'torch' not in sys.modules\n"
        "import torch, importlib; importlib.reload(hisparse)\n"
        "assert 'torch._dynamo' not in sys.modules and 'hisparse.torch_ops' not in sys.modules\n"
        "assert not hasattr(torch.ops.hisparse, 'copy_items')\n"
        "import hisparse.torch_ops; assert hasattr(torch.ops.hisparse, 'copy_items')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
