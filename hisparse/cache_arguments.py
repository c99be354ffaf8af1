"""Checks of what a HotBufferCache is asked for."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any


def at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if operator.index(value) < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return operator.index(value)


def leaders_of_layers(index_layers: Sequence[int] | None, num_layers: int, records_misses: bool) -> list[int]:
    """For each layer, the layer whose selection it uses."""
    layers = list(range(num_layers)) if index_layers is None else list(index_layers)
    if len(layers) != num_layers:
        raise ValueError(f"index_layers: expected {num_layers} entries, got {len(layers)}")
    for layer, leader in enumerate(layers):
        if not 0 <= leader <= layer or layers[leader] != leader:
            raise ValueError(f"index_layers: layer {layer} cannot use the selection of layer {leader}, got {layers}")
    if layers != list(range(num_layers)) and not records_misses:
        raise ValueError('index_layers: the "key value" layout records no copies that another layer could replay')
    return layers
