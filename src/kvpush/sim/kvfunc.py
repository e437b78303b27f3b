"""What the simulated model computes: KV words from (token, position, plane), the next token from KV words.

Both sides use it: the worker writes and reads KV with it, the benchmark computes the expected text with it.
All arithmetic is on int64 and wraps; a *plane* is one KV head of one layer (see memory.py).
The constants are the multipliers of splitmix64 (Steele, Lea, Flood 2014).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.int64]

FIRST_TOKEN = 4
"""Ids below it are special tokens, which the simulated model never samples."""

SPOTS = 16
"""KV words that one sampled token depends on, drawn anew for each context length."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_SALTED = np.int64(0xBF58476D1CE4E5B9 - 2**64)


def mix(values: ArrayLike) -> Words:
    """Scramble int64 values, one by one; different values stay different."""
    # logical shifts, which int64 does not have
    words = np.atleast_1d(np.asarray(values, dtype=np.int64)).view(np.uint64) * _GAMMA
    words = (words ^ (words >> np.uint64(30))) * _MIX1
    words = (words ^ (words >> np.uint64(27))) * _MIX2
    mixed: Words = (words ^ (words >> np.uint64(31))).view(np.int64)
    return mixed


def line_seeds(tokens: Words, positions: Words) -> Words:
    """One value per token, from which the words of all its planes follow."""
    return mix(tokens * np.int64(1 << 32) + positions)


def plane_salts(planes: int) -> Words:
    """One value per plane, none of them a seed of `line_seeds`."""
    return mix(-np.arange(1, planes + 1, dtype=np.int64))


def kv_words(seeds: Words, salts: Words) -> Words:
    """KV words of every seed (token) in every plane: shape (planes, tokens)."""
    words: Words = (salts[:, None] ^ seeds[None, :]) * _SALTED
    return words


def spots(contexts: Words, planes: int) -> tuple[Words, Words]:
    """(position, plane) of the words that the next token after each context length depends on.

    Both have shape (contexts, SPOTS); positions are below their context length, which must be at least 1.
    The last position is always among them: its KV was written by the step that samples.
    """
    draws = mix(contexts[:, None] * np.int64(SPOTS) + np.arange(SPOTS, dtype=np.int64)[None, :])
    positions = (draws & np.int64(0x7FFFFFFF)) % contexts[:, None]
    positions[:, 0] = contexts - 1
    return positions, ((draws >> 32) & np.int64(0x7FFFFFFF)) % planes


def next_tokens(words: Words, vocabulary: int) -> Words:
    """The token sampled from spot words of shape (contexts, SPOTS)."""
    weights = 2 * np.arange(SPOTS, dtype=np.int64) + 1
    sums = (words * weights[None, :]).sum(axis=1)
    return (mix(sums) & np.int64(0x7FFFFFFF)) % (vocabulary - FIRST_TOKEN) + FIRST_TOKEN


def expected_tokens(prompt: Sequence[int], count: int, planes: int, vocabulary: int) -> list[int]:
    """The `count` tokens the simulated model gives after `prompt`, wherever its KV was computed."""
    tokens = np.empty(len(prompt) + count, dtype=np.int64)
    tokens[: len(prompt)] = prompt
    salts = plane_salts(planes)
    contexts = np.arange(len(prompt), len(prompt) + count, dtype=np.int64)
    positions, chosen = spots(contexts, planes)
    for row, context in enumerate(contexts):
        seeds = line_seeds(tokens[positions[row]], positions[row])
        words = (seeds ^ salts[chosen[row]]) * _SALTED
        tokens[context] = next_tokens(words[None, :], vocabulary)[0]
    return [int(token) for token in tokens[len(prompt) :]]
