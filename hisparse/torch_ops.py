"""The ops as operators of torch, ``torch.ops.hisparse.*``, for torch.compile and torch.export.

``import hisparse.torch_ops``, before anything is compiled, registers every op with torch.library: a schema that says
what it writes; an implementation for tensors on a CPU and one for tensors on a GPU, both the function of that name in
:mod:`hisparse` or :mod:`hisparse.kvcacheio`; and one for tensors without memory, which compilers trace with. Where
torch.compile or torch.export captures a call of the function itself, the operator is what gets into the graph::

    import hisparse.torch_ops

    @torch.compile(fullgraph=True)
    def step(...):
        hisparse.load_cache_to_device_buffer_mla(...)

Other calls of the function are what they were: straight to the extension, past torch's dispatcher. The import takes
more than a second where the compiler of torch is not loaded yet, so ``import hisparse`` leaves it to whoever compiles.

In a graph,

- arrays are torch tensors, and arguments are checked when it runs;
- a table of layer addresses does not tell the compiler which tensors it names. It takes the table for what the op
  writes. So calls with one table stay in order, but what else the region does with the layers themselves may be moved
  to the other side of a call: leave that to another region;
- direct transfers with indices on a GPU wait for them, so they have no place in a CUDA graph.

``torch.fx``'s ``make_fx`` on tensors that have memory sees calls of operators alone, not of the functions.

:func:`hisparse.kvcacheio.get_device_accessible_ptr` is no operator: the address that it returns is that of one tensor,
and nothing for a graph to keep.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # what substitute_in_graph imports: where that fails, nothing is registered yet

import hisparse

from . import _C, kvcacheio

_SWAP_IN = ("device_buffer_tokens", "device_buffer", "top_k_device_locs", "lru_slots")
_PLAN = ("miss_src", "miss_dst", "miss_count")

# What each op writes.
_WRITES: dict[str, tuple[str, ...]] = {
    "copy_items": ("dst",),
    "load_cache_to_device_buffer_mla": _SWAP_IN + _PLAN,
    "load_cache_to_device_buffer_dsv4_mla": _SWAP_IN + _PLAN,
    "load_blocks_to_device_buffer_mha": (
        "device_buffer_tokens",
        "device_buffer_k",
        "device_buffer_v",
        "top_k_device_locs",
        "lru_slots",
    ),
    "copy_cache_planned_mla": ("device_buffer",),
    "transfer_cache_dsv4_mla": ("dst_ptrs",),
    "translate_padded_hisparse_locations": (),
    "transfer_kv_per_layer": ("dst_k", "dst_v"),
    "transfer_kv_per_layer_pf_lf": ("dst_k", "dst_v"),
    "transfer_kv_per_layer_ph_lf": ("dst_k", "dst_v"),
    "transfer_kv_all_layer": ("dst_k_layers", "dst_v_layers"),
    "transfer_kv_all_layer_lf_pf": ("dst_k", "dst_v"),
    "transfer_kv_all_layer_lf_ph": ("dst_k", "dst_v"),
    "transfer_kv_per_layer_mla": ("dst",),
    "transfer_kv_per_layer_mla_pf_lf": ("dst",),
    "transfer_kv_all_layer_mla": ("dst_layers",),
    "transfer_kv_all_layer_mla_lf_pf": ("dst",),
    "transfer_kv_direct": ("dst_layers",),
    "transfer_kv_per_layer_direct_pf_lf": ("dst_ptrs",),
    "transfer_kv_all_layer_direct_lf_pf": ("dst_ptrs",),
    "transfer_embedding_ranges_direct": ("dst",),
    "copy_all_layer_kv_cache_cpu": ("data_ptrs",),
}
# The functions of the operators, with what they write.
WRITES: dict[Callable[..., Any], tuple[str, ...]] = {
    getattr(hisparse if hasattr(hisparse, name) else kvcacheio, name): writes for name, writes in _WRITES.items()
}

# Annotation of a function's parameter: type in the schema, with the place of the mark of what is written.
_TYPES = {
    "Tensor": "Tensor{}",
    "Tensor | None": "Tensor{}?",
    "Sequence[Tensor]": "Tensor{}[]",
    "Sequence[int]": "SymInt[]",
    "int": "SymInt",
    "int | None": "SymInt?",
    "bool": "bool",
    "None": "()",
}


def _library_for_good() -> torch.library.Library:
    """A library whose operators stay at exit.

    torch takes them away there, and a daemon thread that is in a call of one crashes (torch 2.13.0).
    """
    library = torch.library.Library("hisparse", "DEF")
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and alive[0] is library:
            finalizer.atexit = False
    return library


_library = _library_for_good()
_dispatchers: dict[str, Callable[..., Any]] = {}


def schema(function: Callable[..., Any], writes: tuple[str, ...]) -> str:
    """The operator's schema, from the function's signature."""
    signature = inspect.signature(function)
    parts = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        mark = f"(a{writes.index(parameter.name)}!)" if parameter.name in writes else ""
        part = f"{_TYPES[parameter.annotation].format(mark)} {parameter.name}"
        parts.append(part if parameter.default is parameter.empty else f"{part}={parameter.default}")
    returned = _TYPES[signature.return_annotation].format("")
    return f"{function.__name__}({', '.join(parts)}) -> {returned}"


def dispatch(name: str, *arguments: Any) -> Any:
    """Calls the operator with the arguments of the extension's function of that name.

    The extension does so itself where an argument is of a tensor type with a ``__torch_dispatch__`` of its own.
    """
    return _dispatchers[name](*arguments)


def _fake(function: Callable[..., Any], writes: tuple[str, ...]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def fake(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        for name in writes:
            tensors = given.get(name)
            for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                if tensor is not None:
                    _fix_offset(name, tensor)
        if signature.return_annotation == "Tensor":  # the one op that makes a tensor: locations through a mapping
            mapping, locations = given["mapping"], given["locations"]
            return torch.empty_like(
                locations,
                dtype=torch.promote_types(mapping.dtype, locations.dtype),
                memory_format=torch.contiguous_format,
            )
        return None

    return fake


def _fix_offset(name: str, tensor: torch.Tensor) -> None:
    """Makes a symbolic storage offset of a tensor that is written a constant, by its sizes and strides.

    Inductor takes the offset of such a view for 0, so the op would write to the start of the tensor that it is a view
    of: seen in torch 2.9.1 and 2.13.0, https://github.com/pytorch/pytorch/issues/198068. An offset that is one symbol
    is that of an input of the graph, which is right.
    """
    if isinstance(tensor.storage_offset(), torch.SymInt):
        for number in (*tensor.shape, *tensor.stride()):
            int(number)
        expression = getattr(tensor.storage_offset(), "node", None)
        if expression is not None and expression.maybe_as_int() is None and not expression.expr.is_symbol:
            raise ValueError(
                f"{name}: expected a view whose place in its tensor the compiler knows, got one at the storage offset "
                f"{tensor.storage_offset()}; pass it to the compiled region as an argument"
            )


def _register(function: Callable[..., Any], writes: tuple[str, ...]) -> None:
    name = function.__name__
    _library.define(schema(function, writes), tags=(torch.Tag.needs_exact_strides,))
    for key in ("CPU", "CUDA"):  # which is the key of ROCm as well
        _library.impl(name, function, key)
    torch.library.register_fake(f"hisparse::{name}", _fake(function, writes), lib=_library)

    operator = getattr(torch.ops.hisparse, name)
    parameters = inspect.signature(function).parameters.values()
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    positional = len(parameters) - len(keywords)

    def call(*arguments: Any, **options: Any) -> Any:
        return operator(*arguments, **options)

    def call_positionally(*arguments: Any) -> Any:
        # What the extension takes beyond the function's arguments is between the two.
        return operator(*arguments[:positional], **dict(zip(keywords, arguments[positional:], strict=False)))

    # torch.compile puts these in the place of the functions; that of the extension is what a copy of ours ends at.
    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(call)
    torch.compiler.substitute_in_graph(getattr(_C, name), skip_signature_check=True)(call_positionally)
    _dispatchers[name] = call_positionally


for _function, _writes in WRITES.items():
    _register(_function, _writes)
