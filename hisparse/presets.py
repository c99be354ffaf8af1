"""What one token has in one layer, for real models: ``hisparse.HotBufferCache`` takes these by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Layout = Literal["latent", "key value", "dsv4"]

_BYTES = {"uint8": 1, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Field:
    """``count`` values of one dtype, by the name that torch gives it."""

    name: str
    dtype: str
    count: int

    @property
    def size_bytes(self) -> int:
        return self.count * _BYTES[self.dtype]


@dataclass(frozen=True)
class ItemFormat:
    """The item of one token in one layer.

    Attributes:
        name: What it is called in messages.
        fields: The parts of an item, one after another.
        layout: "latent": one pool, items one after another. "key value": two such pools, of keys and of values, with
            items of the same size. "dsv4": one pool of DeepSeek-V4's padded pages (584 bytes a token).
        block_tokens: Tokens that one entry of a selection stands for; 1 where the selection names tokens.
    """

    name: str
    fields: tuple[Field, ...]
    layout: Layout = "latent"
    block_tokens: int = 1

    @property
    def item_size_bytes(self) -> int:
        """Bytes of one token in one layer of one pool."""
        return sum(field.size_bytes for field in self.fields)

    @property
    def pool_count(self) -> int:
        return 2 if self.layout == "key value" else 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.pool_count * self.item_size_bytes

    def split(self, items: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of uint8 items [..., item_size_bytes] by field name, each [..., count] of its dtype."""
        import torch

        if items.dtype != torch.uint8 or items.shape[-1] != self.item_size_bytes:
            raise ValueError(
                f"items: expected uint8 [..., {self.item_size_bytes}], got {items.dtype} {list(items.shape)}"
            )
        views, start = {}, 0
        for field in self.fields:
            views[field.name] = items[..., start : start + field.size_bytes].view(getattr(torch, field.dtype))
            start += field.size_bytes
        return views


PRESETS = {
    preset.name: preset
    for preset in (
        # 512 fp8 values of the latent, a scale for each 128 of them, and the rotary part.
        ItemFormat(
            "deepseek-v3.2-fp8",
            (Field("latent", "float8_e4m3fn", 512), Field("scales", "float32", 4), Field("rope", "bfloat16", 64)),
        ),
        ItemFormat("deepseek-v3.2-bf16", (Field("latent", "bfloat16", 512), Field("rope", "bfloat16", 64))),
        # A scale for each 64 of the 448 fp8 values, and a byte of padding.
        ItemFormat(
            "deepseek-v4-c4",
            (
                Field("latent", "float8_e4m3fn", 448),
                Field("rope", "bfloat16", 64),
                Field("scales", "float8_e8m0fnu", 7),
                Field("padding", "uint8", 1),
            ),
            layout="dsv4",
        ),
        # One of the four heads of 128 values, as a GPU has it at tensor parallel size 4.
        ItemFormat("minimax-m3", (Field("head", "bfloat16", 128),), layout="key value", block_tokens=128),
    )
}


def item_format(item: ItemFormat | str | int) -> ItemFormat:
    """A format, the name of a preset, or the bytes of an item in the "latent" layout."""
    if isinstance(item, ItemFormat):
        return item
    if isinstance(item, str):
        if item not in PRESETS:
            raise ValueError(f"item: expected one of {', '.join(PRESETS)}, got {item!r}")
        return PRESETS[item]
    if isinstance(item, bool) or not isinstance(item, int):
        raise TypeError(f"item: expected an ItemFormat, the name of a preset or a number of bytes, got {item!r}")
    if item < 1:
        raise ValueError(f"item: expected at least 1 byte, got {item}")
    return ItemFormat(f"{item} bytes", (Field("bytes", "uint8", item),))
