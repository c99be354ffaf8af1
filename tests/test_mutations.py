"""The mistakes of ci/mutation_list.py can be made in the tree as it is. That each is noticed is for ci/mutations.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation_list import BY_HAND, ROOT, dropped_barriers, mutations

pytest.importorskip("elftools", reason="the rules on device code read it with pyelftools")
from isa import amd_rules  # noqa: E402

ALL = mutations()
NVIDIA_RULES = {"wide-loads", "wide-stores", "loads-in-flight", "spills", "registers"}


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_a_mistake_can_be_made(mutation):
    text = (ROOT / mutation.file).read_text()
    assert (
        text.count(mutation.before) == 1 if mutation in BY_HAND else text.count(mutation.before) > mutation.occurrence
    )
    wrong = mutation.apply(text)
    assert len(wrong) - len(text) == len(mutation.after) - len(mutation.before) and wrong != text
    rules = amd_rules.RULES | amd_rules.WIDE_COPY_RULES if mutation.arch.startswith("gfx") else NVIDIA_RULES
    assert (
        mutation.rule in rules if mutation.arch else all((ROOT / "tests" / name).is_file() for name in mutation.tests)
    )


def test_there_are_mistakes_of_every_kind():
    assert len(ALL) >= 20 and len({mutation.name for mutation in ALL}) == len(ALL)
    assert len([mutation for mutation in ALL if mutation.arch]) >= 5
    assert 3 <= len([mutation for mutation in ALL if mutation.quick]) <= 4
    assert {Path(mutation.file).parent.name for mutation in ALL} == {"common", "host", "hip", "cuda"}


def test_every_barrier_of_the_shared_kernels_is_dropped_once():
    files = {path: path.read_text() for path in (ROOT / "kernels" / "common").glob("*.cuh")}
    barriers = sum(text.count(f"{kind}_barrier();") for text in files.values() for kind in ("block", "warp"))
    assert barriers == len(list(dropped_barriers())) >= 5
