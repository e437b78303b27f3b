"""Runs of bytes to be copied, as arrays: putting them together, in order, as few as possible."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpush.core.layout import Layout, Region

Array = NDArray[np.int64]


class Runs(NamedTuple):
    """Copies of `nbytes` bytes each; arrays of one shape."""

    local: Array
    remote: Array
    nbytes: Array

    @classmethod
    def empty(cls) -> "Runs":
        """No runs."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing)

    def at(self, local: Array, remote: Array) -> "Runs":
        """These runs, once at each pair of offsets."""
        nbytes = np.broadcast_to(self.nbytes[:, None], (len(self.nbytes), len(local)))
        return Runs((self.local[:, None] + local).ravel(), (self.remote[:, None] + remote).ravel(), nbytes.ravel())


class Seams(NamedTuple):
    """Addresses where one region ends and the next begins: no transport takes a run across (ascending)."""

    local: Array
    remote: Array

    @classmethod
    def of(cls, local: Layout, remote: Layout) -> "Seams":
        """The seams of two sides; most layouts have none."""
        return cls(_seams(local.regions), _seams(remote.regions))


def concatenate(parts: Iterable[Runs]) -> Runs:
    """All these runs, in this order."""
    return Runs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def merge(runs: Runs, seams: Seams | None = None) -> Runs:
    """The same copies in ascending order of `local`, neighbours on both sides made one (but for seams)."""
    local, remote, nbytes = runs
    if len(local) < 2:
        return runs
    # timsort: what comes in is made of a few ascending sequences
    order = local.argsort(kind="stable")
    local, remote, nbytes = local[order], remote[order], nbytes[order]
    breaks = (local[1:] != local[:-1] + nbytes[:-1]) | (remote[1:] != remote[:-1] + nbytes[:-1])
    if seams is not None:
        breaks |= _among(local[1:], seams.local) | _among(remote[1:], seams.remote)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return Runs(local[starts], remote[starts], np.add.reduceat(nbytes, starts))


def _among(addresses: Array, seams: Array) -> NDArray[np.bool_] | np.bool_:
    if not len(seams):
        return np.False_
    nearest = np.searchsorted(seams, addresses).clip(max=len(seams) - 1)
    among: NDArray[np.bool_] = seams[nearest] == addresses
    return among


def _seams(regions: tuple[Region, ...]) -> Array:
    ends = {region.base + region.nbytes for region in regions}
    return np.array(sorted(ends.intersection(region.base for region in regions)), np.int64)
