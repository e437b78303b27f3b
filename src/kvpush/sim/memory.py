"""The simulated model's view of the real KV cache tensors: one word per token, KV head and layer.

A *line* is the memory of one token of one head of one layer, `tensor[block, head, token, :]`. One word of each line
is written and read, at a place that moves from plane to plane; the rest is left alone, so that simulating a
forward pass costs little of the host that it runs on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpush.sim import kvfunc
from kvpush.sim.kvfunc import Words

WORD = 8

_STRIDE = 5  # words that the place in the line moves on from one plane to the next


@dataclass(frozen=True)
class Tensor:
    """One layer's cache: byte offset in the common buffer, and shape and strides (bytes) as
    [block, head, token, bytes of a line]."""

    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]


class KVMemory:
    """Reads and writes KV words by block table. All positions and blocks are int64 arrays."""

    def __init__(self, buffer: NDArray[np.uint8], layers: Sequence[Tensor]) -> None:
        """`buffer` holds all layers; every layer has the same shape and strides, in whole words."""
        first = layers[0]
        if any((layer.shape, layer.strides) != (first.shape, first.strides) for layer in layers):
            raise ValueError("layers differ in shape or strides")
        self._words = buffer[: len(buffer) // WORD * WORD].view(np.int64)
        self.block_size = first.shape[2]
        self._block_stride, head_stride, self._token_stride = (stride // WORD for stride in first.strides)
        heads, words = first.shape[1], first.shape[3] // WORD
        lines = [layer.offset // WORD + head * head_stride for layer in layers for head in range(heads)]
        self._plane_base = np.array([line + i * _STRIDE % words for i, line in enumerate(lines)], dtype=np.int64)
        self.layers = len(layers)
        self._salts = kvfunc.plane_salts(self.planes)

    @property
    def planes(self) -> int:
        """KV words per token."""
        return len(self._plane_base)

    def planes_of(self, layers: slice) -> slice:
        """The planes of a range of layers."""
        each = self.planes // self.layers
        return slice(layers.start * each, layers.stop * each)

    def lines(self, blocks: Words, positions: Words) -> Words:
        """Word index of each position's line within its plane; `blocks` is the request's block table."""
        return (
            blocks[positions // self.block_size] * self._block_stride
            + (positions % self.block_size) * self._token_stride
        )

    def write(self, lines: Words, seeds: Words, planes: slice) -> None:
        """Write the words of tokens with `seeds` at `lines`, in these planes."""
        # plane by plane: neighbouring tokens are neighbours in memory
        self._words[self._plane_base[planes, None] + lines[None, :]] = kvfunc.kv_words(seeds, self._salts[planes])

    def read(self, lines: Words, planes: Words) -> Words:
        """The words at `lines` in `planes`, element by element."""
        words: Words = self._words[lines + self._plane_base[planes]]
        return words

    def wrong_tokens(self, lines: Words, seeds: Words) -> Words:
        """Indices of the tokens of which any word differs from what it should be."""
        found = self._words[self._plane_base[:, None] + lines[None, :]]
        wrong: Words = np.flatnonzero((found != kvfunc.kv_words(seeds, self._salts)).any(axis=0))
        return wrong
