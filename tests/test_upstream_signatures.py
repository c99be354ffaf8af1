"""Our functions take what those of sglang-kernel and sglang take, by the same names, in the same order.

data/upstream_signatures.json holds the parameters of the pinned releases: names, order and defaults, nothing else.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import hisparse
from hisparse import kvcacheio

UPSTREAM = json.loads((Path(__file__).parent / "data" / "upstream_signatures.json").read_text())
OURS = {"sgl_kernel.kvcacheio": kvcacheio, "sglang.kernels.ops.kvcache.hisparse": hisparse}
# The function of sglang's hisparse.py that this package does not have: a swap-in of several speculative steps at once.
LACKING = {"load_cache_to_device_buffer_spec_mla"}

FUNCTIONS = [(module, name) for module, contents in UPSTREAM.items() for name in contents["functions"]]


def test_what_upstream_has_and_we_lack():
    """A report: `pytest -rP -k upstream_has` prints it."""
    lacking = {name for module, name in FUNCTIONS if not hasattr(OURS[module], name)}
    for module, contents in UPSTREAM.items():
        missing = sorted(lacking & set(contents["functions"]))
        print(f"{module} ({contents['release']}): {len(contents['functions'])} functions, we lack {missing or 'none'}")
    assert lacking == LACKING
    assert not lacking & set(UPSTREAM["sgl_kernel.kvcacheio"]["functions"])


@pytest.mark.parametrize(("module", "name"), FUNCTIONS, ids=lambda value: value.rpartition(".")[2])
def test_names_order_and_defaults(module, name):
    ours = getattr(OURS[module], name, None)
    if ours is None:
        pytest.skip("we lack it")
    parameters = list(inspect.signature(ours).parameters.values())
    wanted = UPSTREAM[module]["functions"][name]
    assert [p.name for p in parameters[: len(wanted)]] == [p["name"] for p in wanted]
    for parameter, upstream in zip(parameters, wanted, strict=False):
        is_positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert is_positional or upstream.get("keyword_only"), f"{parameter.name} is keyword-only here alone"
        default = upstream.get("default", inspect.Parameter.empty)
        if isinstance(default, dict):  # by platform: ours is resolved at the call
            assert parameter.default is None and default == {"rocm": 16, "cuda": 32}
        else:
            assert parameter.default == default, parameter.name
    for extra in parameters[len(wanted) :]:
        assert extra.kind is inspect.Parameter.KEYWORD_ONLY and extra.default is not inspect.Parameter.empty


def test_kvcacheio_has_no_function_of_its_own():
    public = {name for name, value in vars(kvcacheio).items() if inspect.isfunction(value)}
    assert public == set(UPSTREAM["sgl_kernel.kvcacheio"]["functions"])
