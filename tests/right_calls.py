"""A right call of every public op, by name: what tests of wrong arguments start from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import test_errors
import test_kvcacheio_errors

import hisparse
from hisparse import kvcacheio

NO_OPS = {"build_info"}


def public_ops() -> dict[str, Callable]:
    """Every function that users call with arrays, from the modules themselves."""
    found = {name: getattr(hisparse, name) for name in hisparse.__all__ if name not in NO_OPS}
    found |= vars(kvcacheio)
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


class Arguments(dict):
    """Arguments by name, and all arrays that the call could change: those that tables of addresses name, too."""

    pools: list[np.ndarray]


def _with_pools(arguments: dict[str, Any], pools: list[np.ndarray] | None = None) -> Arguments:
    call = Arguments(arguments)
    call.pools = [value for value in arguments.values() if isinstance(value, np.ndarray)] + (pools or [])
    return call


RIGHT_CALLS: dict[str, Callable[[], Arguments]] = {
    function.__name__: lambda make=test_errors.ARGUMENTS[name]: _with_pools(make())
    for name, function in test_errors.OPS.items()
}
RIGHT_CALLS |= {op: lambda op=op: _with_pools(*test_kvcacheio_errors.valid(op)) for op in test_kvcacheio_errors.ALL_OPS}
