"""From block tables to transport descriptors. Pure: frozen inputs to a frozen plan.

A *cell* is as many tokens as the smaller of the two block sizes: it lies in one block on either side, so
what it takes to copy one is a fixed pattern of runs, moved about by two offsets. The pattern is found once
per pair of layouts, token by token and head by head, and merged; a plan is pattern x cells, merged again.
That covers every pair of strides alike (NHD or HND, K and V apart or interleaved, layers apart or in one
area), and heads: only those that both ranks hold are copied, so unequal ranks need nothing more here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpush.core.layout import Blocks, Layers, Layout, Plane, Span
from kvpush.core.runs import Array, Runs, Seams, concatenate, merge


@dataclass(frozen=True, eq=False)
class Plan:
    """Descriptors of one operation: copy `nbytes[i]` bytes from `local[i]` to `remote[i]`.

    All three are int64 arrays of shape (descriptors,), in ascending order of `local`. No two descriptors
    overlap, and no two could be one.
    """

    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    @property
    def descriptors(self) -> int:
        """How many descriptors the plan has."""
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """How many bytes the plan moves."""
        return int(self.nbytes.sum())


def empty_plan() -> Plan:
    """Nothing to copy."""
    return Plan(*Runs.empty())


def plan(
    span: Span,
    local: Layout,
    local_blocks: Blocks,
    local_start: int,
    remote: Layout,
    remote_blocks: Blocks,
    remote_start: int,
    layers: Layers | None = None,
) -> Plan:
    """Descriptors that copy tokens `span` from `local_blocks` to `remote_blocks`.

    `local_start`/`remote_start` are the token positions for which each side's block list begins (the first
    id of each group holds that token). Raises `ValueError` when a list does not cover the span, or has ids
    that its layout has not, or when the layouts have different planes.

    Exactly the span is copied, with one exception: between blocks of the same size and inner order, a last
    block is copied to its end, which saves a run per head. Either side owns the rest of that block alone as
    long as the span ends where the prompt does, or at the end of a block.

    `layers` limits the copy to some of the local layout's layers; None copies all.
    """
    if span.tokens < 0 or span.start < 0:
        raise ValueError(f"[{span.start}, {span.end}) is no span of tokens")
    parts = [Runs.empty()]
    pair = _join(local, remote, layers)
    for index, group in enumerate(pair.groups):
        mine = _Table.of(local_blocks, index, local_start, group.local_size, local.groups[index].num_blocks)
        theirs = _Table.of(remote_blocks, index, remote_start, group.remote_size, remote.groups[index].num_blocks)
        for stretch in group.stretches(span):
            parts.extend(group.runs(stretch, mine, theirs))
    return Plan(*merge(concatenate(parts), pair.seams))


class _Strides(NamedTuple):
    """Bytes from one block, head, token and lane to the next, and how many lanes there are."""

    block: int
    head: int
    token: int
    lane: int
    lanes: int

    @classmethod
    def of(cls, plane: Plane) -> "_Strides":
        return cls(plane.block_stride, plane.head_stride, plane.token_stride, plane.lane_stride, plane.lanes)

    def offsets(self, heads: Array, lanes: Array, tokens: Array, piece: int) -> Array:
        """Where these pieces of `piece` bytes are: shape (heads, lanes, tokens), flattened.

        `lanes` counts the pieces that both sides have: the side with fewer lanes has several in each.
        """
        each = len(lanes) // self.lanes
        lane = lanes // each * self.lane + lanes % each * piece
        return (heads[:, None, None] * self.head + lane[:, None] + tokens * self.token).ravel()


_ByStrides = dict[tuple[_Strides, _Strides], list[tuple[int, int]]]
"""Base addresses of planes (local and remote), by what strides they have."""


class _Stretch(NamedTuple):
    """The tokens [`begin`, `end`) of each of the cells [`first`, `last`)."""

    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class _Table:
    """One side's block ids of one group, as an array, and the index of the request's block that is first."""

    ids: Array
    first: int
    size: int

    @classmethod
    def of(cls, blocks: Blocks, group: int, start: int, size: int, num_blocks: int) -> "_Table":
        if group >= len(blocks):
            raise ValueError(f"there is no list of block ids for cache group {group}")
        ids = np.array(blocks[group], np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < num_blocks:
            raise ValueError(f"group {group} has a block id that is not in [0, {num_blocks})")
        return cls(ids, start // size, size)

    def offsets(self, tokens: Array, strides: _Strides) -> Array:
        """Where each of these (ascending) token positions is, relative to its plane's base."""
        index = tokens // self.size - self.first
        if index[0] < 0 or index[-1] >= len(self.ids):
            raise ValueError(
                f"{len(self.ids)} blocks of {self.size} from block {self.first} of the request on do not hold "
                f"tokens {tokens[0]} to {tokens[-1]}"
            )
        return self.ids[index] * strides.block + tokens % self.size * strides.token


@dataclass(frozen=True, eq=False)
class _Planes:
    """All planes of a group with the same strides on either side; one base address per plane and side."""

    local: _Strides
    remote: _Strides
    local_bases: Array
    remote_bases: Array
    heads: "_Heads"
    seams: Seams

    @property
    def alike(self) -> bool:
        """Whether heads and tokens lie in the same order on both sides."""
        return self.local[1:] == self.remote[1:]

    def pattern(self, begin: int, end: int) -> Runs:
        """The runs that copy the tokens [begin, end) of a cell at offset 0, in every plane."""
        lanes = np.arange(lcm(self.local.lanes, self.remote.lanes), dtype=np.int64)
        heads, tokens = np.arange(self.heads.shared, dtype=np.int64), np.arange(begin, end, dtype=np.int64)
        piece = self.heads.nbytes // len(lanes)
        local = self.local.offsets(heads + self.heads.local_skip, lanes, tokens, piece)
        remote = self.remote.offsets(heads + self.heads.remote_skip, lanes, tokens, piece)
        one_plane = merge(Runs(local, remote, np.full(local.size, piece, np.int64)))
        return merge(one_plane.at(self.local_bases, self.remote_bases), self.seams)


class _Heads(NamedTuple):
    """Which heads both ranks hold: `shared` of them, the first of which is each rank's `skip`-th."""

    shared: int
    local_skip: int
    remote_skip: int
    nbytes: int

    @classmethod
    def of(cls, local: Layout, remote: Layout) -> "_Heads":
        first, last = max(local.head_start, remote.head_start), min(local.head_end, remote.head_end)
        return cls(max(0, last - first), first - local.head_start, first - remote.head_start, local.head_bytes)


@dataclass(frozen=True, eq=False)
class _Group:
    """One cache group of a pair of layouts. `whole` are the patterns of whole cells, one per `planes`."""

    local_size: int
    remote_size: int
    packed: bool
    planes: tuple[_Planes, ...]
    whole: tuple[Runs, ...]

    @property
    def cell(self) -> int:
        """Tokens per cell."""
        return min(self.local_size, self.remote_size)

    def stretches(self, span: Span) -> Iterator[_Stretch]:
        """The span as a part of its first cell, whole cells, and a part of its last one."""
        size, end = self.cell, span.end
        if not span.tokens:
            return
        if self.packed and (self.local_size != self.remote_size or span.start % size):
            raise ValueError(f"packed blocks can only be copied whole, not from token {span.start} on")
        if self.packed or (self.local_size == self.remote_size and all(planes.alike for planes in self.planes)):
            end = -(-end // size) * size
        first, last = -(-span.start // size), end // size
        if first > last:
            yield _Stretch(last, first, span.start % size, end % size)
            return
        if span.start % size:
            yield _Stretch(first - 1, first, span.start % size, size)
        if first < last:
            yield _Stretch(first, last, 0, size)
        if end % size:
            yield _Stretch(last, last + 1, 0, end % size)

    def runs(self, stretch: _Stretch, mine: _Table, theirs: _Table) -> Iterator[Runs]:
        """What copies a stretch, one item per kind of plane."""
        tokens = np.arange(stretch.first, stretch.last, dtype=np.int64) * self.cell
        is_whole = stretch.end - stretch.begin == self.cell
        for planes, whole in zip(self.planes, self.whole, strict=True):
            pattern = whole if is_whole else planes.pattern(stretch.begin, stretch.end)
            local, remote = mine.offsets(tokens, planes.local), theirs.offsets(tokens, planes.remote)
            order = local.argsort()
            yield pattern.at(local[order], remote[order])


class _Pair(NamedTuple):
    """What can be said of two layouts before any block is known."""

    groups: tuple[_Group, ...]
    seams: Seams


@lru_cache(maxsize=256)
def _join(local: Layout, remote: Layout, layers: Layers | None) -> _Pair:
    theirs = {(plane.layer, plane.kind, plane.group): plane for plane in remote.planes}
    if len(local.planes) != len(theirs) or len(local.groups) != len(remote.groups):
        raise ValueError("the layouts have different layers or cache groups")
    pairs: list[_ByStrides] = [{} for _ in local.groups]
    for plane in local.planes if layers is None else local.planes_of(layers):
        other = theirs.get((plane.layer, plane.kind, plane.group))
        if other is None:
            raise ValueError(f"the remote layout has no {plane.kind} of {plane.layer} in group {plane.group}")
        same_strides = pairs[plane.group].setdefault((_Strides.of(plane), _Strides.of(other)), [])
        same_strides.append((plane.base, other.base))
    seams = Seams.of(local, remote)
    return _Pair(tuple(_group(local, remote, index, found, seams) for index, found in enumerate(pairs)), seams)


def _group(local: Layout, remote: Layout, index: int, pairs: _ByStrides, seams: Seams) -> _Group:
    sizes = local.groups[index].block_size, remote.groups[index].block_size
    if max(sizes) % min(sizes):
        raise ValueError(f"block sizes {sizes[0]} and {sizes[1]} of group {index} are no multiples of one another")
    packed = any(plane.packing for plane in (*local.planes, *remote.planes) if plane.group == index)
    heads = _Heads.of(local, remote)
    planes = tuple(_planes(strides, bases, heads, seams) for strides, bases in pairs.items())
    return _Group(*sizes, packed, planes, tuple(each.pattern(0, min(sizes)) for each in planes))


def _planes(strides: tuple[_Strides, _Strides], bases: list[tuple[int, int]], heads: _Heads, seams: Seams) -> _Planes:
    local_bases, remote_bases = np.array(bases, np.int64).T
    return _Planes(*strides, local_bases, remote_bases, heads, seams)
