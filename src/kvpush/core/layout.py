"""Where each token's KV lives in a worker's memory, as frozen values.

A *plane* is one layer's keys, values or latents in one memory area. The bytes of KV head `h` (counted
within this rank) of token `t` (within its block) of block `b` are the `head_bytes` bytes at

    plane.base + b * plane.block_stride + h * plane.head_stride + t * plane.token_stride

which covers NHD and HND orders, K and V apart or interleaved, and MLA (one head of latents). A rank holds
the heads [`head_start`, `head_end`) of `total_heads`; a cache group has its own block size. Strides are
read from the tensors themselves by the adapter, never assumed.
"""

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """What a plane holds."""

    KEY = "k"
    VALUE = "v"
    LATENT = "latent"


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One contiguous memory area that the transport must register: `nbytes` bytes from `base`."""

    base: int
    nbytes: int
    device: int = 0


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """One layer's keys, values or latents; addresses and strides in bytes."""

    layer: str
    kind: Kind
    group: int
    base: int
    block_stride: int
    head_stride: int
    token_stride: int


class Group(msgspec.Struct, frozen=True, array_like=True):
    """One KV cache group: `num_blocks` blocks of `block_size` tokens, ids 0..num_blocks-1."""

    block_size: int
    num_blocks: int


class Layout(msgspec.Struct, frozen=True):
    """One worker rank's KV cache.

    `head_bytes` is the size of one head of one token in one plane (head_dim * itemsize).
    `memory` is the transport's memory kind: "dram" or "vram".
    """

    model: str
    dtype: str
    head_bytes: int
    total_heads: int
    head_start: int
    head_end: int
    tp_rank: int
    tp_size: int
    memory: str
    groups: tuple[Group, ...]
    planes: tuple[Plane, ...]
    regions: tuple[Region, ...]

    @property
    def heads(self) -> int:
        """KV heads this rank holds."""
        return self.head_end - self.head_start

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes on this rank, over all planes of group 0."""
        return self.heads * self.head_bytes * sum(1 for plane in self.planes if plane.group == 0)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Token positions [start, end) of a prompt."""

    start: int
    end: int

    @property
    def tokens(self) -> int:
        """How many tokens the span covers."""
        return self.end - self.start


Blocks = tuple[tuple[int, ...], ...]
"""Block ids per cache group. The first id of each group holds the span's first token (so a span that
starts at token s begins in block s // block_size of the request), the last its last token."""


class Difference(msgspec.Struct, frozen=True):
    """The first field in which two layouts cannot work together, with both values."""

    field: str
    ours: str
    theirs: str
