"""KV items from real text: every word of the shipped play becomes one key row and one value row.

The projection is fixed, so the items depend on the text and the seed alone:

1. A word is the bag of its character 2-, 3- and 4-grams and of itself, with its ends marked. Each n-gram is hashed by
   CRC-32 into one of 4096 rows of a Gaussian matrix; the rows are added up and the sum is scaled to length 1.
2. The context at a position is the sum of the words up to it, each weighted by 0.95 per word of distance (48 words far)
   and by one over the square root of how often the word occurs, scaled to length 1. So places that speak of the same
   things have similar contexts, and the context drifts slowly from word to word.
3. The key row is the context (128 values) and a rotary position code (32 values, 0.3 long). The value row is the word
   itself (128 values), as in 1 with a second Gaussian matrix.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from importlib import resources

import numpy as np

CONTENT_WIDTH = 128
POSITION_WIDTH = 32
KEY_WIDTH = CONTENT_WIDTH + POSITION_WIDTH
VALUE_WIDTH = CONTENT_WIDTH
ITEM_WIDTH = KEY_WIDTH + VALUE_WIDTH

_HASH_ROWS = 4096
_DECAY = 0.95
_WINDOW = 48
_POSITION_LENGTH = 0.3


def load_text() -> str:
    """The play that ships with the package, see hisparse/data/README."""
    return resources.files("hisparse").joinpath("data/as_you_like_it.txt").read_text(encoding="ascii")


@dataclass(frozen=True)
class Words:
    """A text as word numbers: `vocabulary[number[i]]` is its i-th word or punctuation mark."""

    vocabulary: list[str]
    number: np.ndarray

    @classmethod
    def of(cls, text: str) -> Words:
        words = re.findall(r"[a-z']+|[^\sa-z']", text.lower())
        numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
        return cls(list(numbers), np.array([numbers[word] for word in words]))


class Projection:
    """Turns stretches of one text into KV items. The same seed gives the same items."""

    def __init__(self, words: Words, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._number = words.number
        self._rarity = 1 / np.sqrt(np.bincount(words.number)).astype(np.float32)
        self._key_of_word = _embed(words.vocabulary, rng)
        self._value_of_word = _embed(words.vocabulary, rng)

    def items(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, ITEM_WIDTH]: key row, then value row, of a request made of words start..stop-1."""
        number = self._number[start:stop]
        weighted = self._key_of_word[number] * self._rarity[number, None]
        context = weighted.copy()
        for distance in range(1, min(_WINDOW, len(number))):
            context[distance:] += _DECAY**distance * weighted[:-distance]
        keys = np.concatenate([_unit(context), _position_code(len(number))], axis=1)
        return np.concatenate([keys, self._value_of_word[number]], axis=1)


def _embed(vocabulary: list[str], rng: np.random.Generator) -> np.ndarray:
    gaussian = rng.standard_normal((_HASH_ROWS, CONTENT_WIDTH), dtype=np.float32)
    return _unit(np.stack([gaussian[_ngram_rows(word)].sum(axis=0) for word in vocabulary]))


def _ngram_rows(word: str) -> list[int]:
    marked = f"<{word}>"
    ngrams = [marked[i : i + n] for n in (2, 3, 4) for i in range(len(marked) - n + 1)]
    return [zlib.crc32(ngram.encode()) % _HASH_ROWS for ngram in [*ngrams, marked]]


def _position_code(count: int) -> np.ndarray:
    frequencies = 10000.0 ** -np.linspace(0, 1, POSITION_WIDTH // 2, endpoint=False)
    angles = np.arange(count)[:, None] * frequencies
    return _POSITION_LENGTH * _unit(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
