"""Puts functions in the place of others, in every module that has them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any


def copy_of(function: FunctionType) -> FunctionType:
    """Another function object that does the same at the same cost, so that its places can be told from the first's."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    for name in ("__kwdefaults__", "__annotations__", "__doc__", "__module__", "__qualname__"):
        setattr(copy, name, getattr(function, name))
    return copy


def put_in_place(pairs: Sequence[tuple[object, object]]) -> list[list[str]]:
    """For each (old, new) pair, puts the new object wherever a loaded module, or a class of one, has the old one as an
    attribute, whatever its name. Returns the places of each pair, such as "package.module.Class.name"."""
    numbers = {id(old): number for number, (old, _) in enumerate(pairs)}
    places: list[list[str]] = [[] for _ in pairs]

    def look(owner: str, namespace: Mapping[str, Any], put: Callable[[str, object], None]) -> None:
        for name, value in list(namespace.items()):
            kind = type(value)  # isinstance would run what deprecated names of a module do
            is_static = kind is staticmethod
            number = numbers.get(id(value.__func__ if is_static else value))
            if number is not None:
                new = pairs[number][1]
                put(name, staticmethod(new) if is_static else new)  # type: ignore[arg-type]
                places[number].append(f"{owner}.{name}")
            elif issubclass(kind, type) and value.__dict__.get("__module__") == owner:
                look(f"{owner}.{name}", value.__dict__, lambda name, new, value=value: setattr(value, name, new))

    for name, module in list(sys.modules.items()) if pairs else []:
        if isinstance(module, ModuleType):
            look(name, module.__dict__, module.__dict__.__setitem__)
    return places


class ImportWatcher(importlib.abc.MetaPathFinder):
    """From `start` to `stop`, calls `loaded(module)` when a module of these names has run, before its importer does."""

    def __init__(self, names: set[str], loaded: Callable[[ModuleType], None]):
        self.names, self.loaded = names, loaded

    def start(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.names:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                self.loaded(module)

        loader.exec_module = exec_module
