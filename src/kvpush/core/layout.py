"""Where each token's KV lives in a worker's memory, as frozen values.

A *plane* is one layer's keys, values or latents in one memory area. The bytes of KV head `h` (counted
within this rank) of token `t` (within its block) of block `b` are the `head_bytes` bytes at

    plane.base + b * plane.block_stride + h * plane.head_stride + t * plane.token_stride

which covers NHD and HND orders, K and V apart or interleaved, and MLA (one head of latents). Some backends
keep a head in `lanes` pieces of `head_bytes / lanes` bytes, `lane_stride` apart: keys stored column by column
(vLLM's CPU attention) are one lane per dimension. Where tokens cannot be told apart inside of a block at
all, `packing` names its inner order, and only whole blocks of the same size can be copied. A rank holds the
heads [`head_start`, `head_end`) of `total_heads`; a cache group has its own block size. Strides are read from
the tensors themselves by the adapter, never assumed.
"""

from bisect import bisect_right
from collections.abc import Set as AbstractSet
from enum import StrEnum
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import msgspec

from kvpush.core.errors import Reason, RemoteProtocolError

MEMORY_KINDS = ("dram", "vram")

_MAX_ADDRESS = 1 << 62  # so that address arithmetic stays within int64
_MAX_PARTS = 1 << 14
_NAMES_SHOWN = 6


class Kind(StrEnum):
    """What a plane holds."""

    KEY = "k"
    VALUE = "v"
    LATENT = "latent"
    PAIR = "kv"  # a head's key and value side by side, as one


class Layers(NamedTuple):
    """The layers [`first`, `last`) of a layout, in the order of its planes."""

    first: int
    last: int


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
    lanes: int = 1
    lane_stride: int = 0
    packing: str = ""


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
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order of the planes."""
        return tuple(dict.fromkeys(plane.layer for plane in self.planes))

    def planes_of(self, layers: Layers) -> tuple[Plane, ...]:
        """The planes of some layers."""
        names = set(self.layers[layers.first : layers.last])
        return tuple(plane for plane in self.planes if plane.layer in names)

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes on this rank, over all planes of group 0."""
        return self.heads * self.head_bytes * sum(1 for plane in self.planes if plane.group == 0)


def one_head(
    model: str, dtype: str, head_bytes: int, group: Group, planes: tuple[Plane, ...], region: Region
) -> Layout:
    """A cache in host memory with one KV head and one group, of an engine with one rank."""
    return Layout(model, dtype, head_bytes, 1, 0, 1, 0, 1, "dram", (group,), planes, (region,))


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Token positions [start, end) of a prompt."""

    start: int
    end: int

    @property
    def tokens(self) -> int:
        """How many tokens the span covers."""
        return self.end - self.start


NOTHING = Span(0, 0)
"""No tokens."""

_PlaneId = tuple[str, Kind]

Blocks = tuple[tuple[int, ...], ...]
"""Block ids per cache group. The first id of each group holds the span's first token (so a span that
starts at token s begins in block s // block_size of the request), the last its last token."""


class Difference(msgspec.Struct, frozen=True):
    """The first field in which two layouts cannot work together, with both values.

    `remedy` says what to change, "" when the two values say it all.
    """

    field: str
    ours: str
    theirs: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: ours {self.ours}, theirs {self.theirs}"
        return f"{text}. {self.remedy}" if self.remedy else text


# two layouts --------------------------------------------------------------------------------------------
def first_difference(ours: Layout, theirs: Layout) -> Difference | None:
    """The first thing that keeps these two ranks from exchanging KV, or None. Symmetric but for naming.

    Addresses, strides, block counts and block sizes that are whole factors of one another may differ.
    """
    for field in ("model", "dtype", "head_bytes", "total_heads", "memory"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return Difference(field, str(mine), str(other))
    return _heads_differ(ours, theirs) or _planes_differ(ours, theirs) or _block_sizes_differ(ours, theirs)


def _heads_differ(ours: Layout, theirs: Layout) -> Difference | None:
    """Ranks are paired one to one and hold the same heads: the only place that forbids unequal TP."""
    if ours.tp_size != theirs.tp_size:
        remedy = "Start both engines with the same --tensor-parallel-size."
        return Difference("tp_size", str(ours.tp_size), str(theirs.tp_size), remedy)
    mine, other = (ours.head_start, ours.head_end), (theirs.head_start, theirs.head_end)
    if mine != other:
        remedy = "Connect each rank to the peer's rank of the same number."
        return Difference("heads", "[{}, {})".format(*mine), "[{}, {})".format(*other), remedy)
    return None


def _planes_differ(ours: Layout, theirs: Layout) -> Difference | None:
    mine = {(plane.layer, plane.kind): plane.group for plane in ours.planes}
    other = {(plane.layer, plane.kind): plane.group for plane in theirs.planes}
    if mine.keys() != other.keys():
        return _layers_differ(mine.keys() - other.keys(), other.keys() - mine.keys())
    for (layer, kind), group in mine.items():
        if group != other[layer, kind]:
            return Difference(f"group of {layer} ({kind})", str(group), str(other[layer, kind]))
    return _packing_differs(ours, theirs)


def _packing_differs(ours: Layout, theirs: Layout) -> Difference | None:
    packings = {(plane.layer, plane.kind): plane.packing for plane in theirs.planes}
    for plane in ours.planes:
        mine, other = plane.packing, packings[plane.layer, plane.kind]
        if mine != other:
            remedy = "Use the same attention backend on the same kind of processor on both sides."
            return Difference(
                f"packing of {plane.layer} ({plane.kind})", mine or "by token", other or "by token", remedy
            )
    return None


def _layers_differ(only_ours: AbstractSet[_PlaneId], only_theirs: AbstractSet[_PlaneId]) -> Difference:
    remedy = (
        "Serve the same model with the same attention backend on both sides, and the same speculative "
        "(draft or MTP) setting: draft layers have KV of their own."
    )
    return Difference("layers", _only(only_ours), _only(only_theirs), remedy)


def _only(planes: AbstractSet[_PlaneId]) -> str:
    """The layers (or parts of layers) that one side alone has, in words, at most a few of them by name."""
    if not planes:
        return "none that the other lacks"
    names = sorted(f"{layer} ({kind})" for layer, kind in planes)
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{len(names)} that the other lacks: {shown}{', ...' if len(names) > _NAMES_SHOWN else ''}"


def _block_sizes_differ(ours: Layout, theirs: Layout) -> Difference | None:
    mine = tuple(group.block_size for group in ours.groups)
    other = tuple(group.block_size for group in theirs.groups)
    if len(mine) != len(other):
        return Difference("groups", str(len(mine)), str(len(other)), "Use the same hybrid cache setting on both sides.")
    for index, (a, b) in enumerate(zip(mine, other, strict=True)):
        if max(a, b) % min(a, b):
            remedy = "One --block-size must be a whole multiple of the other."
            return Difference(f"groups[{index}].block_size", str(a), str(b), remedy)
        if a != b and (packing := next((p.packing for p in ours.planes if p.group == index and p.packing), "")):
            remedy = f"Use the same --block-size: {packing} blocks can only be copied whole."
            return Difference(f"groups[{index}].block_size", str(a), str(b), remedy)
    return None


# what a peer sends --------------------------------------------------------------------------------------
def check_blocks(layout: Layout, span: Span, blocks: Blocks) -> None:
    """Check a registration against the layout of whoever owns the blocks.

    Raises `RemoteProtocolError` BAD_SPAN (empty, negative) or BAD_BLOCK (number of groups, number of ids
    for the span, id out of range, id twice).
    """
    check_span(span)
    if len(blocks) != len(layout.groups):
        detail = f"{len(blocks)} lists of ids for {len(layout.groups)} cache groups"
        raise RemoteProtocolError(Reason.BAD_BLOCK, detail, "blocks")
    for index, (group, ids) in enumerate(zip(layout.groups, blocks, strict=True)):
        _check_ids(group, span, ids, f"blocks[{index}]")


def check_span(span: Span) -> None:
    """Raises `RemoteProtocolError` BAD_SPAN unless the span has tokens."""
    if not 0 <= span.start < span.end:
        detail = f"[{span.start}, {span.end}) is no span of tokens: 0 <= start < end must hold"
        raise RemoteProtocolError(Reason.BAD_SPAN, detail, "span")


def _check_ids(group: Group, span: Span, ids: tuple[int, ...], field: str) -> None:
    expected = -(-span.end // group.block_size) - span.start // group.block_size
    if len(ids) != expected:
        detail = f"{len(ids)} ids, but [{span.start}, {span.end}) takes {expected} blocks of {group.block_size}"
        raise RemoteProtocolError(Reason.BAD_BLOCK, detail, field)
    for extreme in (min(ids), max(ids)):
        if not 0 <= extreme < group.num_blocks:
            detail = f"id {extreme} is not in [0, {group.num_blocks})"
            raise RemoteProtocolError(Reason.BAD_BLOCK, detail, field)
    if len(set(ids)) != len(ids):
        raise RemoteProtocolError(Reason.BAD_BLOCK, "an id occurs twice", field)


def check_layout(layout: Layout) -> None:
    """Check that a layout from the wire makes sense by itself, before anything is computed from it.

    Raises `RemoteProtocolError` BAD_MESSAGE naming the field: sizes outside of what any engine has, heads
    outside of the model's, strides under which tokens overlap, planes outside of the regions.
    """
    _check_sizes(layout)
    _check_regions(layout.regions)
    _check_planes(layout)


def _check_regions(regions: tuple[Region, ...]) -> None:
    for index, region in enumerate(regions):
        inside = region.base >= 0 and region.nbytes > 0 and region.base + region.nbytes <= _MAX_ADDRESS
        _require(inside and region.device >= 0, f"regions[{index}]", f"{region} is no memory area")
    areas = sorted(_area(region) for region in regions)
    for (_, end), (start, _) in pairwise(areas):
        _require(end <= start, "regions", f"the area that starts at {start} overlaps the one that ends at {end}")


def _check_planes(layout: Layout) -> None:
    names = {(plane.layer, plane.kind) for plane in layout.planes}
    _require(len(names) == len(layout.planes), "planes", "a layer has two planes of one kind")
    areas = sorted(_area(region) for region in layout.regions)
    for index, plane in enumerate(layout.planes):
        field = f"planes[{index}]"
        _require(0 <= plane.group < len(layout.groups), field, f"there is no group {plane.group}")
        end = plane.base + _extent(layout, plane, field)
        below = bisect_right(areas, plane.base, key=itemgetter(0)) - 1
        _require(below >= 0 and end <= areas[below][1], field, f"[{plane.base}, {end}) is outside of the regions")


def _check_sizes(layout: Layout) -> None:
    _within(layout.head_bytes, 1, 1 << 20, "head_bytes")
    _within(layout.total_heads, 1, 1 << 16, "total_heads")
    _within(layout.tp_size, 1, 1 << 12, "tp_size")
    _within(layout.tp_rank, 0, layout.tp_size - 1, "tp_rank")
    _within(layout.head_start, 0, layout.total_heads - 1, "head_start")
    _within(layout.head_end, layout.head_start + 1, layout.total_heads, "head_end")
    _require(layout.memory in MEMORY_KINDS, "memory", f"'{layout.memory}' is none of {', '.join(MEMORY_KINDS)}")
    for field, values in (("groups", layout.groups), ("planes", layout.planes), ("regions", layout.regions)):
        _within(len(values), 1, _MAX_PARTS, field)
    for index, group in enumerate(layout.groups):
        _within(group.block_size, 1, 1 << 16, f"groups[{index}].block_size")
        _within(group.num_blocks, 1, 1 << 31, f"groups[{index}].num_blocks")


def _extent(layout: Layout, plane: Plane, field: str) -> int:
    """Bytes from a plane's base to its end; refuses strides under which two tokens share bytes."""
    group = layout.groups[plane.group]
    _within(plane.lanes, 1, layout.head_bytes, field)
    _require(layout.head_bytes % plane.lanes == 0, field, f"{layout.head_bytes} bytes are no {plane.lanes} lanes")
    extent = layout.head_bytes // plane.lanes
    axes = (
        (plane.lane_stride, plane.lanes),
        (plane.token_stride, group.block_size),
        (plane.head_stride, layout.heads),
        (plane.block_stride, group.num_blocks),
    )
    for stride, count in sorted(axes):
        if count == 1:  # never stepped along, so its stride says nothing
            continue
        _require(0 < stride <= _MAX_ADDRESS, field, f"stride {stride} is not in [1, 2**62]")
        _require(stride >= extent, field, f"a stride of {stride} bytes makes {extent}-byte parts overlap")
        extent += (count - 1) * stride
    return extent


def _area(region: Region) -> tuple[int, int]:
    return region.base, region.base + region.nbytes


def _within(value: int, low: int, high: int, field: str) -> None:
    _require(low <= value <= high, field, f"{value} is not in [{low}, {high}]")


def _require(holds: bool, field: str, detail: str) -> None:
    if not holds:
        raise RemoteProtocolError(Reason.BAD_MESSAGE, detail, f"layout.{field}")
