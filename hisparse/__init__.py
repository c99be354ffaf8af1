"""Hot-buffer swap-in for sparse attention: one kernel source on CUDA, ROCm and the CPU.

Importing this package initialises no device, and needs neither a GPU nor torch. The first call on a GPU loads the
driver: libcuda.so.1, or the libamdhip64 that the process has loaded already, then that of a rocm_sdk package beside
this one, then libamdhip64.so.7, .so.6 and .so. HISPARSE_CUDA_LIBRARY and HISPARSE_HIP_LIBRARY name another file.
A process that is forked from one in which a GPU was used cannot use it: fork before the first call, or spawn.
"""

try:
    from ._C import build_info
except ModuleNotFoundError as error:
    if error.name != f"{__name__}._C":
        raise
    raise ImportError(
        f"{__path__[0]} is hisparse's source without its extension: start Python in another folder, "
        "or build it in place with `pip install -e .`"
    ) from error

from typing import TYPE_CHECKING, Any

from . import cpu, kvcacheio
from ._version import __version__
from .content_check import ContentError, checking
from .copies import copy_cache_planned_mla, transfer_cache_dsv4_mla, translate_padded_hisparse_locations
from .host_memory import HostRegistration, pin_host_pool, register_host_memory
from .request_state import reset_request_state
from .swap_in import (
    copy_items,
    load_blocks_to_device_buffer_mha,
    load_cache_to_device_buffer_dsv4_mla,
    load_cache_to_device_buffer_mla,
)

if TYPE_CHECKING:
    from . import presets, trace
    from .hot_buffer_cache import CapacityError, HotBufferCache

__all__ = [
    "CapacityError",
    "ContentError",
    "HostRegistration",
    "HotBufferCache",
    "__version__",
    "build_info",
    "checking",
    "copy_cache_planned_mla",
    "copy_items",
    "cpu",
    "kvcacheio",
    "load_blocks_to_device_buffer_mha",
    "load_cache_to_device_buffer_dsv4_mla",
    "load_cache_to_device_buffer_mla",
    "pin_host_pool",
    "presets",
    "register_host_memory",
    "reset_request_state",
    "trace",
    "transfer_cache_dsv4_mla",
    "translate_padded_hisparse_locations",
]


def __getattr__(name: str) -> Any:
    """What is imported at its first use, so that the ops alone cost no more than themselves."""
    from importlib import import_module

    if name in ("CapacityError", "HotBufferCache"):
        return getattr(import_module(f"{__name__}.hot_buffer_cache"), name)
    if name in ("presets", "trace"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
