"""The memory of simulated processes, and what the KV of a prompt looks like in it.

Addresses are made up: process number n has the bytes from n << 32 on. The content of a token depends on its
key, so that a block which holds another prompt's KV, or a mixture, is always noticed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvpush.core.ids import Key
from kvpush.core.layout import Blocks, Group, Kind, Layout, Plane, Region, Span, one_head

HEAD_BYTES = 4
_KINDS = (Kind.KEY, Kind.VALUE)


def make_layout(process: int, block_size: int = 4, num_blocks: int = 64, model: str = "m", layers: int = 1) -> Layout:
    """Two planes per layer, one head, one cache group."""
    base, plane_bytes = process << 32, block_size * num_blocks * HEAD_BYTES
    planes = tuple(
        Plane(layer, kind, 0, base + i * plane_bytes, block_size * HEAD_BYTES, HEAD_BYTES, HEAD_BYTES)
        for i, (layer, kind) in enumerate(product((f"layer{n}" for n in range(layers)), _KINDS))
    )
    return one_head(
        model, "float32", HEAD_BYTES, Group(block_size, num_blocks), planes, Region(base, plane_bytes * len(planes))
    )


def token_content(key: Key, token: int, plane: int) -> bytes:
    """The KV of one token in one plane."""
    return hashlib.blake2s(f"{key} {token} {plane}".encode(), digest_size=HEAD_BYTES).digest()


class Memory:
    """The KV cache of one process."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._base = layout.regions[0].base
        self.bytes: NDArray[np.uint8] = np.zeros(layout.regions[0].nbytes, np.uint8)

    def fill(self, key: Key, span: Span, blocks: Blocks, layers: int | None = None) -> None:
        """Write what a forward pass over `span` would, or its first `layers` layers; `blocks` begin with the span's
        first block."""
        planes = None if layers is None else layers * len(_KINDS)
        for offset, content in self._tokens(key, span, blocks, planes):
            self.bytes[offset : offset + HEAD_BYTES] = np.frombuffer(content, np.uint8)

    def holds(self, key: Key, span: Span, blocks: Blocks) -> bool:
        """Whether every byte of the span is the prompt's."""
        tokens = self._tokens(key, span, blocks)
        return all(self.bytes[offset : offset + HEAD_BYTES].tobytes() == content for offset, content in tokens)

    def scribble(self, ids: Iterable[int]) -> None:
        """Let these blocks belong to someone else, who writes to them."""
        size = self.layout.groups[0].block_size * HEAD_BYTES
        for plane in self.layout.planes:
            for block in ids:
                first = plane.base - self._base + block * size
                self.bytes[first : first + size] = 0xEE

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of some bytes."""
        first = address - self._base
        return self.bytes[first : first + nbytes].copy()

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Bytes that arrive."""
        first = address - self._base
        self.bytes[first : first + len(data)] = data

    def blocks_of(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> set[int]:
        """The blocks that these runs of bytes lie in."""
        size = self.layout.groups[0].block_size * HEAD_BYTES
        plane_bytes = size * self.layout.groups[0].num_blocks
        touched: set[int] = set()
        for address, nbytes in zip(addresses.tolist(), lengths.tolist(), strict=True):
            first = (address - self._base) % plane_bytes
            touched.update(range(first // size, (first + nbytes - 1) // size + 1))
        return touched

    def _tokens(self, key: Key, span: Span, blocks: Blocks, planes: int | None = None) -> Iterator[tuple[int, bytes]]:
        size = self.layout.groups[0].block_size
        first_block = span.start // size
        for token in range(span.start, span.end):
            block = blocks[0][token // size - first_block]
            for number, plane in enumerate(self.layout.planes[:planes]):
                offset = plane.base - self._base + block * plane.block_stride + token % size * plane.token_stride
                yield offset, token_content(key, token, number)
