"""hisparse in the place of sglang's own hot-buffer ops and of ``sgl_kernel.kvcacheio``.

::

    from hisparse.integrations import sglang

    print(sglang.install())  # what is in place, and why the rest is not
    ...
    sglang.uninstall()

A server needs no line of code: sglang loads the entry point ``hisparse`` of its group ``sglang.srt.plugins`` in each of
its processes, which installs what the environment variable HISPARSE_SGLANG says.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any

import hisparse
from hisparse import info, kvcacheio

from .replacing import ImportWatcher, copy_of, put_in_place

# Functions that hisparse may stand in for, by module.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "sglang.kernels.ops.kvcache.hisparse": (
        "load_cache_to_device_buffer_mla",
        "load_cache_to_device_buffer_dsv4_mla",
        "load_cache_to_device_buffer_spec_mla",
        "load_blocks_to_device_buffer_mha",
        "copy_cache_planned_mla",
        "transfer_cache_dsv4_mla",
    ),
    "sglang.kernels.ops.kvcache.hisparse_slot_mapping": ("translate_padded_hisparse_locations",),
    "sgl_kernel.kvcacheio": tuple(name for name, value in vars(kvcacheio).items() if inspect.isfunction(value)),
}
DISTRIBUTIONS = {"sglang": "sglang", "sgl_kernel": "sglang-kernel"}
# Releases that were tested; docs/sglang.md says how.
TESTED = {"sglang": ("0.5.21", "0.5.22", "0.5.23"), "sglang-kernel": ("0.4.10",)}

_NOT_INSTALLED = "not installed"
_logger = logging.getLogger(__name__)


@dataclass
class Op:
    """One of sglang's functions: ``replaced`` by ours, ``waiting`` for its module to be imported, or ``left``."""

    module: str
    name: str
    state: str = "left"
    reason: str = _NOT_INSTALLED  # why it is left, or what it waits for
    places: tuple[str, ...] = ()  # the names of sglang's function that are now names of ours
    ours: FunctionType | None = field(default=None, repr=False)
    theirs: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.state}, {self.reason or f'names: {len(self.places)}'}"


@dataclass(frozen=True)
class Report:
    """What hisparse stands in for at a moment. As text, a line for every function."""

    ops: tuple[Op, ...]

    def __getitem__(self, name: str) -> Op:
        return next(op for op in self.ops if op.name == name)

    def names(self, state: str) -> list[str]:
        return [op.name for op in self.ops if op.state == state]

    def __str__(self) -> str:
        lines = [f"hisparse {hisparse.__version__} in sglang: {len(self.names('replaced'))} of {len(self.ops)} ops"]
        for module in FUNCTIONS:
            lines += [module, *(f"  {op}" for op in self.ops if op.module == module)]
        return "\n".join(lines)


_lock = threading.RLock()
_ops = [Op(module, name) for module, names in FUNCTIONS.items() for name in names]


def install(ops: Iterable[str] | None = None, *, any_version: bool = False) -> Report:
    """Makes sglang use the ops of hisparse, under every name that it has for them.

    In modules that were imported before, ours takes the place of sglang's function wherever the module or a class of
    it has the function under some name, by ``from ... import ... as`` too. Nothing is imported: a module that comes
    later gets ours when it has run, before anyone takes functions from it. What holds a function of sglang's in another
    way keeps it: a closure, a list, a ``functools.partial``, a CUDA graph. So install before a server is built.

    An op is left as it is, and the report says why, where hisparse has no such op; where its package is not installed,
    of a release that was not tested, or takes other arguments than ours; and where torch is built for a target, or the
    machine has a GPU, that this hisparse has no code for. To know the GPUs, the driver is asked: a process that is
    forked later cannot use them.

    Args:
        ops: Names of functions; None for all. What earlier calls installed stays.
        any_version: Whether to take releases that were not tested, where the arguments are ours.

    Raises:
        ValueError: `ops` has a name that is none of sglang's functions that hisparse knows.
    """
    known = [op.name for op in _ops]
    wanted = known if ops is None else list(ops)
    if unknown := sorted(set(wanted) - set(known)):
        raise ValueError(f"ops: expected names among {', '.join(known)}, got {', '.join(map(repr, unknown))}")
    with _lock:
        target_reason = _target_reason()
        for op in _ops:
            if op.name in wanted and op.state != "replaced":
                op.reason = _reason(op, any_version) or target_reason
                op.state = "left" if op.reason else "waiting"
                op.reason = op.reason or f"{op.module} is not imported yet"
        _watcher.start()
        for module in FUNCTIONS:
            if module in sys.modules:
                _take_over(sys.modules[module])
        return report()


def uninstall() -> Report:
    """Puts sglang's functions back under every name that has ours by :func:`install`, or was imported from one since.

    A name that was given something else in the meantime is left alone; if that calls ours, it goes on to.
    """
    with _lock:
        _watcher.stop()
        put_in_place([(op.ours, op.theirs) for op in _ops if op.state == "replaced"])
        for number, op in enumerate(_ops):
            _ops[number] = Op(op.module, op.name)
        return report()


def report() -> Report:
    """What hisparse stands in for now."""
    with _lock:
        return Report(tuple(replace(op) for op in _ops))


def plugin() -> None:
    """What sglang calls when it loads its plugins.

    HISPARSE_SGLANG says which ops to install: ``all``, which unset means too, ``none``, or names with commas between.
    """
    value = os.environ.get("HISPARSE_SGLANG", "").strip() or "all"
    if value == "none":
        return
    try:
        _logger.info("%s", install(None if value == "all" else [name.strip() for name in value.split(",")]))
    except ValueError as error:
        raise ValueError(f"HISPARSE_SGLANG: {error}") from None


def _take_over(module: ModuleType) -> None:
    """Puts our functions in the place of the module's, as far as they take the same arguments."""
    with _lock:
        pairs = []
        for op in _ops:
            if op.module != module.__name__ or op.state == "left":
                continue
            theirs = vars(module).get(op.name)
            if theirs is not op.ours or op.ours is None:  # else it is in place, but maybe not everywhere
                reason = argument_reason(theirs, _function_of(op))
                if reason is not None:
                    op.state, op.reason = "left", reason
                    continue
                op.ours = op.ours or copy_of(_function_of(op))
                op.theirs, op.state, op.reason = theirs, "replaced", ""
            pairs.append(op)
        places = put_in_place([(op.theirs, op.ours) for op in pairs])
        for op, new in zip(pairs, places, strict=True):
            op.places += tuple(new)


_watcher = ImportWatcher(set(FUNCTIONS), _take_over)


def _function_of(op: Op) -> Any:
    return getattr(kvcacheio if op.module == "sgl_kernel.kvcacheio" else hisparse, op.name, None)


def _reason(op: Op, any_version: bool) -> str:
    """Why the op is left as it is, as far as that can be told without its module."""
    if _function_of(op) is None:
        return f"hisparse {hisparse.__version__} has no such op"
    package = op.module.partition(".")[0]
    distribution = DISTRIBUTIONS[package]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = "of an unknown release"
    if any_version or version in TESTED[distribution]:
        return ""
    return f"{distribution} is {version}, tested are {', '.join(TESTED[distribution])} (any_version=True takes it)"


def _target_reason() -> str:
    """Why ops cannot run where sglang runs: by what torch is built for, and the GPUs of the machine."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    for other in ("xpu", "musa"):
        if getattr(torch.version, other, None):
            return f"torch is built for {other.upper()}"
    name = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu"
    target = next(target for target in info.collect()["targets"] if target["target"] == name)
    if not target["built"]:
        return f"torch is built for {name}, this hisparse for {', '.join(hisparse.build_info()['targets'])}"
    for device in target["devices"]:
        if device["covered_by"] is None:
            return f"this hisparse has no code for {device['name']} ({device['arch']})"
    return ""


def argument_reason(theirs: Any, ours: Callable[..., Any]) -> str | None:
    """Why a call that `theirs` takes could mean something else to `ours`; None where it means the same."""
    if theirs is None:
        return "this release has no such function"
    try:
        wanted = list(inspect.signature(theirs).parameters.values())
    except (TypeError, ValueError):
        return "its arguments are not known"
    have = inspect.signature(ours).parameters
    for place, parameter in enumerate(wanted):
        mine = have.get(parameter.name)
        if mine is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return f"its argument {parameter.name} is none of ours"
        by_place = parameter.kind is not parameter.KEYWORD_ONLY
        if by_place and (mine.kind is not parameter.kind or list(have).index(parameter.name) != place):
            return f"its argument {parameter.name} has another place"
        # Where ours is None, the value is chosen at the call.
        if parameter.default is not parameter.empty and mine.default not in (parameter.default, None):
            return f"its argument {parameter.name} is {parameter.default} by default, ours {mine.default}"
    for name, mine in have.items():
        if mine.default is mine.empty and name not in {parameter.name for parameter in wanted}:
            return f"hisparse needs an argument {name}"
    return None
