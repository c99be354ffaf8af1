"""Transfers from the host against the memory that they are spread over, by layout and kind of host memory.

A page-first pool spreads the items of one layer over all layers' memory. These rows tell what of that is the layout's
and what the footprint's: both layouts over the same number of bytes, in pinned memory and in registered memory of huge
or of 4 KiB pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

from hisparse import kvcacheio

from .timing import device, time_together

LAYERS = 8
ITEM_SIZES = (576, 656, 1152, 4096)
MEGABYTES = (64, 256, 512, 768, 1024, 4096)
QUOTAS = (2, 4)
MEMORIES = ("pinned", "huge pages", "4 KiB pages")
BYTES = 40 << 20  # of one call

COLUMNS = {
    "memory": "host memory",
    "op": "op",
    "item_size_bytes": "item",
    "block_quota": "quota",
    "megabytes": "MiB",
    "us": "us",
    "spread": "spread",
    "gb_per_s": "GB/s",
    "peer_gb_per_s": "peer GB/s",
}


@contextmanager
def host_memory(kind: str, size: int) -> Iterator[Any]:
    """A uint8 tensor that the GPU can reach. OSError where the system has no such pages."""
    import torch

    if kind == "pinned" or device() == "cpu":
        yield torch.full((size,), 7, dtype=torch.uint8, pin_memory=device() == "cuda")
        return
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE if kind == "huge pages" else mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(tensor.data_ptr(), size, 0)):
        raise RuntimeError(f"cannot register {size} bytes of host memory")
    try:
        yield tensor
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(tensor.data_ptr())


def available() -> list[str]:
    """The kinds of memory that this system has."""
    found = []
    for kind in MEMORIES:
        with suppress(OSError), host_memory(kind, 1 << 21):
            found.append(kind)
    return found


def measure(
    peer: ModuleType | None = None,
    progress: Callable[[list[Any]], Iterable[Any]] = lambda steps: steps,
    megabytes: Iterable[int] = MEGABYTES,
) -> Iterator[dict[str, Any]]:
    """One row per kind of memory, footprint, item size, layout and quota."""
    import torch

    target = torch.zeros(BYTES, dtype=torch.uint8, device=device())
    for memory, size in progress(list(product(available(), megabytes))):
        with host_memory(memory, size << 20) as source:
            for item, op, quota in product(ITEM_SIZES, ("per layer", "page first"), QUOTAS):
                stride = item if op == "per layer" else LAYERS * item
                count = BYTES // item
                src = torch.randint((size << 20) // stride, (2, count)).to(device())
                dst = torch.randperm(count).to(device())

                def call(
                    module: ModuleType,
                    i: int,
                    op: str = op,
                    source: Any = source,
                    src: Any = src,
                    dst: Any = dst,
                    item: int = item,
                    quota: int = quota,
                ) -> None:
                    if op == "per layer":
                        module.transfer_kv_per_layer_mla(source, target, src[i], dst, item, block_quota=quota)
                    else:
                        module.transfer_kv_per_layer_mla_pf_lf(
                            source, target, src[i], dst, LAYERS // 2, item, LAYERS * item, block_quota=quota
                        )

                calls = {"ours": partial(call, kvcacheio)} | ({"peer": partial(call, peer)} if peer else {})
                times = time_together(calls, 2)
                rates = {name: count * item / time.median / 1e3 for name, time in times.items()}
                yield {
                    "memory": memory,
                    "op": op,
                    "item_size_bytes": item,
                    "block_quota": quota,
                    "megabytes": size,
                    "us": times["ours"].median,
                    "spread": times["ours"].spread,
                    "gb_per_s": rates["ours"],
                    "peer_gb_per_s": rates.get("peer"),
                }
