"""Random calls and sequences of calls against the references, byte for byte: what fuzz.py runs, as tests."""

from __future__ import annotations

import collections
import os

import fuzz
import fuzz_calls
import kvcacheio_cases
import pytest
from fuzz_calls import CopyItems, Example
from right_calls import public_ops

import hisparse

EXAMPLES = int(os.environ.get("HISPARSE_TEST_EXAMPLES", 1200))
FUZZED = {"copy_items", "load_cache_to_device_buffer_mla", *kvcacheio_cases.OPS, *fuzz_calls.DIRECT_OPS}
FUZZED |= {"transfer_embedding_ranges_direct", "copy_all_layer_kv_cache_cpu"}
FUZZED |= {"load_cache_to_device_buffer_dsv4_mla", "load_blocks_to_device_buffer_mha", "copy_cache_planned_mla"}
FUZZED |= {"transfer_cache_dsv4_mla", "translate_padded_hisparse_locations"}
MOVE_NOTHING = {"get_device_accessible_ptr"}


@pytest.mark.parametrize("width", ["cpu64", "cpu32"])
@pytest.mark.parametrize("kind", fuzz_calls.STRATEGIES)
def test_on_the_cpu_target(kind, width):
    places = tuple(name for name in fuzz.CPU_NAMES if name.startswith(width))
    ran: collections.Counter = collections.Counter()
    fuzz.run_kind(kind, places, fuzz.examples_of(kind, EXAMPLES // 2), seed=1, ran=ran)
    assert {key[1] for key in ran.keys() - {"calls"}} <= set(places) and ran["calls"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", fuzz_calls.STRATEGIES)
def test_on_a_gpu(kind):
    ran: collections.Counter = collections.Counter()
    fuzz.run_kind(kind, ("gpu",), fuzz.examples_of(kind, 4 * EXAMPLES), seed=2, ran=ran)
    assert ran["calls"] > 0


def test_a_failure_shrinks_to_a_test(monkeypatch):
    """An op that leaves out the last item of four or more is found, with the smallest call that shows it."""
    right = hisparse.copy_items

    def wrong(src, dst, src_indices, dst_indices, item_size_bytes, **options):
        kept = slice(None, -1 if len(src_indices) >= 4 else None)
        return right(src, dst, src_indices[kept], dst_indices[kept], item_size_bytes, **options)

    monkeypatch.setattr(hisparse, "copy_items", wrong)
    with pytest.raises(AssertionError) as raised:
        fuzz.run_kind("copy_items", ("cpu64-wave-numpy",), 500, seed=3, ran=collections.Counter())
    code = str(raised.value).partition("\n\n")[2]
    found = eval(code.rpartition("    ")[2].removesuffix(".check()\n"), vars(fuzz_calls))
    assert isinstance(found, Example) and found.call.count == 4 and found.call.item_size_bytes == 1
    namespace: dict = {}
    exec(code, namespace)
    with pytest.raises(AssertionError, match="dst"):
        namespace["test_found_by_fuzzing"]()
    monkeypatch.setattr(hisparse, "copy_items", right)
    namespace["test_found_by_fuzzing"]()


def test_every_op_is_fuzzed():
    assert set(public_ops()) - MOVE_NOTHING == FUZZED
    assert sum(share for _, share in fuzz_calls.STRATEGIES.values()) == 100


def test_the_repr_of_an_example_is_the_code_that_repeats_it():
    call = CopyItems(1, 20, (3, 4), 2, (0, 8), None)
    example = Example("cpu32-chunk-numpy", 7, call)
    assert eval(repr(example), vars(fuzz_calls)) == example
