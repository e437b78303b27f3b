"""Layouts of every kind on real memory: the axes of a cache in any order, and which byte is where."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvpush.core.layout import Group, Kind, Layout, Plane, Region

AXES = ("layer", "kind", "block", "head", "token", "lane")
NHD_APART = ("layer", "kind", "block", "token", "head", "lane")
HND_APART = ("layer", "kind", "block", "head", "token", "lane")
NHD_PAIRED = ("layer", "block", "kind", "token", "head", "lane")
BY_BLOCK = ("block", "layer", "kind", "token", "head", "lane")
COLUMNS = ("layer", "kind", "block", "head", "lane", "token")

KINDS = (Kind.KEY, Kind.VALUE)


@dataclass(frozen=True)
class Shape:
    """What the two sides of a transfer have in common, and (below) what they need not."""

    layers: int = 2
    head_bytes: int = 8
    total_heads: int = 4
    head_start: int = 0
    head_end: int = 4
    block_size: int = 4
    num_blocks: int = 8
    lanes: int = 1
    order: tuple[str, ...] = NHD_APART
    regions: int = 1
    packing: str = ""


@dataclass(frozen=True, eq=False)
class Cache:
    """A layout of one group, and the memory it describes."""

    layout: Layout
    memory: NDArray[np.uint8]

    def where(self, block: int, token: int, head: int) -> Iterator[NDArray[np.int64]]:
        """Offsets in `memory` of each byte of a head (numbered as in the model) of a token, plane by plane."""
        within = head - self.layout.head_start
        for plane in sorted(self.layout.planes, key=lambda plane: (plane.layer, plane.kind)):
            start = plane.base - self.memory.ctypes.data + block * plane.block_stride
            start += within * plane.head_stride + token * plane.token_stride
            piece = self.layout.head_bytes // plane.lanes
            byte = np.arange(self.layout.head_bytes)
            yield start + byte // piece * plane.lane_stride + byte % piece


def cache(shape: Shape, seed: int = 0) -> Cache:
    """A cache of this shape, filled with noise."""
    sizes = {
        "layer": shape.layers,
        "kind": len(KINDS),
        "block": shape.num_blocks,
        "head": shape.head_end - shape.head_start,
        "token": shape.block_size,
        "lane": shape.lanes,
    }
    rng = np.random.default_rng(seed)
    piece = shape.head_bytes // shape.lanes
    array = rng.integers(0, 256, (*(sizes[axis] for axis in shape.order), piece), np.uint8)
    strides = dict(zip(shape.order, array.strides, strict=False))
    base = array.ctypes.data
    planes = tuple(
        Plane(
            layer=f"layers.{layer}",
            kind=KINDS[kind],
            group=0,
            base=base + layer * strides["layer"] + kind * strides["kind"],
            block_stride=strides["block"],
            head_stride=strides["head"],
            token_stride=strides["token"],
            lanes=shape.lanes,
            lane_stride=strides["lane"],
            packing=shape.packing,
        )
        for layer, kind in product(range(shape.layers), range(len(KINDS)))
    )
    part = array.nbytes // shape.regions
    layout = Layout(
        model="m",
        dtype="uint8",
        head_bytes=shape.head_bytes,
        total_heads=shape.total_heads,
        head_start=shape.head_start,
        head_end=shape.head_end,
        tp_rank=0,
        tp_size=1,
        memory="dram",
        groups=(Group(shape.block_size, shape.num_blocks),),
        planes=planes,
        regions=tuple(Region(base + index * part, part) for index in range(shape.regions)),
    )
    return Cache(layout, array.reshape(-1))
