"""The file of a trace: .npz, or an array dumped as .npy."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Trace:
    """The selections of a run.

    Attributes:
        top_k: int32 [steps, layers, rows, K]. Token positions, or block numbers; -1 for an unused entry.
        seq_lens: int32 [steps, rows]. Lengths with the newest token; 0 for an unused row. None where they are not
            known: then no token is the newest, and every request is longer than its hot buffer.
        requests: int32 [steps, rows]. Which request a row is of; None: row n is request n in all steps.
        layers: The model's number of each layer of ``top_k``; None: 0, 1, ...
        block_tokens: Tokens that an entry stands for.
        source: Where the selections come from.
    """

    top_k: np.ndarray
    seq_lens: np.ndarray | None = None
    requests: np.ndarray | None = None
    layers: np.ndarray | None = None
    block_tokens: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        if self.top_k.ndim != 4 or self.top_k.dtype.kind not in "iu":
            raise ValueError(
                f"top_k: expected integers [steps, layers, rows, K], got {self.top_k.dtype} {list(self.top_k.shape)}"
            )
        steps, layers, rows, _ = self.top_k.shape
        for name, shape in (("seq_lens", (steps, rows)), ("requests", (steps, rows)), ("layers", (layers,))):
            array = getattr(self, name)
            if array is not None and (array.shape != shape or array.dtype.kind not in "iu"):
                raise ValueError(f"{name}: expected integers {list(shape)}, got {array.dtype} {list(array.shape)}")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens: expected at least 1, got {self.block_tokens}")

    @property
    def selected_tokens(self) -> int:
        """Tokens that one selection can name, which every hot buffer has to hold."""
        return self.top_k.shape[-1] * self.block_tokens

    @property
    def longest(self) -> int:
        """The largest length, as far as it is known."""
        named = (int(self.top_k.max(initial=-1)) + 1) * self.block_tokens
        return named if self.seq_lens is None else max(named, int(self.seq_lens.max(initial=0)))

    def save(self, path: str | Path) -> None:
        """Compressed .npz, in the narrowest dtype that holds the positions."""
        largest = int(self.top_k.max(initial=0))
        arrays = {"top_k": self.top_k.astype(np.int16 if largest < 2**15 else np.int32)}
        for name in ("seq_lens", "requests", "layers"):
            if getattr(self, name) is not None:
                arrays[name] = getattr(self, name)
        with open(path, "wb") as file:  # with a name, NumPy would add .npz to it
            np.savez_compressed(file, block_tokens=self.block_tokens, source=self.source, **arrays)


def load(path: str | Path, prompt: int | None = None) -> Trace:
    """A trace, or a dump: an .npy file of integers [steps, rows, K] or [steps, layers, rows, K].

    Args:
        path: The file.
        prompt: For a dump: the length of each prompt, so that the n-th step has ``prompt + n`` tokens, n from 1 on.
            None: the lengths are not known.

    Raises:
        ValueError: The file holds something else, or a trace is given a prompt.
    """
    content = np.load(path, allow_pickle=False)
    if isinstance(content, np.ndarray):
        top_k = content[:, None] if content.ndim == 3 else content
        lengths = None
        if prompt is not None and top_k.ndim == 4:
            steps, _, rows, _ = top_k.shape
            lengths = np.repeat(np.arange(prompt + 1, prompt + steps + 1, dtype=np.int32)[:, None], rows, axis=1)
        return Trace(top_k.astype(np.int32) if top_k.dtype.kind in "iu" else top_k, lengths, source=Path(path).name)
    with content:
        if "top_k" not in content:
            raise ValueError(f"{path}: expected a trace, with an array top_k, got {sorted(content)}")
        if prompt is not None:
            raise ValueError(f"{path}: a trace has its own lengths, a prompt is for dumps (.npy)")
        return Trace(
            content["top_k"].astype(np.int32),
            *(content.get(name) for name in ("seq_lens", "requests", "layers")),
            block_tokens=int(content.get("block_tokens", 1)),
            source=str(content.get("source", "")),
        )


def shipped() -> Trace:
    """The trace that comes with the package, see hisparse/data/README."""
    with resources.as_file(resources.files("hisparse").joinpath("data/gemma_trace.npz")) as path:
        return load(path)
