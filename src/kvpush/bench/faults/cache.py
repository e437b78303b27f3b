"""A small KV cache whose bytes tell whose they are, and the pool of its blocks."""

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvpush.core.layout import Group, Kind, Layout, Plane, Region, one_head

LAYERS, BLOCKS, BLOCK_SIZE, TOKEN_BYTES = 2, 48, 4, 8
"""Per plane; a layer has two, keys and values."""
_PLANES = LAYERS * 2


class Cache:
    """Blocks of KV, and which of them are free. Free blocks belong to others at once, and are written by them."""

    def __init__(self) -> None:
        # planes, blocks, tokens, bytes
        self._bytes: NDArray[np.uint8] = np.zeros((_PLANES, BLOCKS, BLOCK_SIZE, TOKEN_BYTES), np.uint8)
        self._free = list(range(BLOCKS))
        self.lend(self._free)

    @property
    def layout(self) -> Layout:
        """Where the cache is."""
        plane, block, token = self._bytes.strides[:3]
        base = self._bytes.ctypes.data
        kinds = itertools.product(range(LAYERS), (Kind.KEY, Kind.VALUE))
        return one_head(
            "faults",
            "uint8",
            TOKEN_BYTES,
            Group(BLOCK_SIZE, BLOCKS),
            tuple(
                Plane(f"layer.{layer}", kind, 0, base + i * plane, block, token, token)
                for i, (layer, kind) in enumerate(kinds)
            ),
            Region(base, self._bytes.nbytes),
        )

    @property
    def held(self) -> int:
        """Blocks that are not free."""
        return BLOCKS - len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Blocks for a request: those that have been free longest, so that none is used again soon by chance."""
        taken, self._free = tuple(self._free[:count]), self._free[count:]
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free blocks, first in line to be used again."""
        self._free = [*blocks, *self._free]
        self.lend(blocks)

    def lend(self, blocks: Iterable[int]) -> None:
        """Let others use free blocks: every byte says which block it is in."""
        for block in blocks:
            self._bytes[:, block] = block

    def compute(self, seed: int, tokens: int, blocks: tuple[int, ...]) -> None:
        """Write what a forward pass over the first `tokens` tokens of prompt `seed` would."""
        wanted = _content(seed, len(blocks) * BLOCK_SIZE)
        flat = self._bytes[:, list(blocks)].reshape(_PLANES, -1, TOKEN_BYTES)
        flat[:, :tokens] = wanted[:, :tokens]
        self._bytes[:, list(blocks)] = flat.reshape(_PLANES, len(blocks), BLOCK_SIZE, TOKEN_BYTES)

    def holds(self, seed: int, tokens: int, blocks: tuple[int, ...]) -> bool:
        """Whether every byte of the prompt's first `tokens` tokens is there."""
        flat = self._bytes[:, list(blocks)].reshape(_PLANES, -1, TOKEN_BYTES)
        return bool((flat[:, :tokens] == _content(seed, len(blocks) * BLOCK_SIZE)[:, :tokens]).all())

    def strays(self) -> int:
        """How many free blocks hold a byte that is not of those who use them now."""
        return sum(bool((self._bytes[:, block] != block).any()) for block in self._free)


def _content(seed: int, tokens: int) -> NDArray[np.uint8]:
    """The KV of a prompt: never a byte below `BLOCKS`, which would be another's. Planes, tokens, bytes."""
    whole = np.random.default_rng(seed).integers(BLOCKS, 256, (_PLANES, 64, TOKEN_BYTES), np.uint8)
    return whole[:, :tokens]
