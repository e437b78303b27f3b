"""Where registered memory is: bounds and devices of many addresses at once."""

import numpy as np
from numpy.typing import NDArray

from kvpush.core.errors import TransportError
from kvpush.core.layout import Region

_HIGHEST = 1 << 62
_NOWHERE = Region(-(1 << 62), 0)  # below all others, so that every address is above the start of one


class Areas:
    """Registered regions, which do not overlap."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        """Raises `TransportError` for a region that can be no memory area."""
        for region in regions:
            if not (region.base >= 0 and region.nbytes > 0 and region.base + region.nbytes <= _HIGHEST):
                raise TransportError(f"{region} is no memory area")
        ordered = [_NOWHERE, *sorted(regions, key=_base)]
        self._starts = np.array([region.base for region in ordered], np.int64)
        self._ends = np.array([region.base + region.nbytes for region in ordered], np.int64)
        self._devices = np.array([region.device for region in ordered], np.int64)
        self._one_device = len({region.device for region in regions}) == 1

    def check(self, addresses: NDArray[np.int64], nbytes: NDArray[np.int64], whose: str) -> None:
        """Raise `TransportError` unless each [address, address + nbytes) is inside of one region."""
        if not len(addresses):
            return
        region = self._region(addresses)
        inside = (nbytes > 0) & (addresses + nbytes <= self._ends[region])
        if not inside.all():
            first = int(np.argmin(inside))
            raise TransportError(
                f"descriptor {first}: {nbytes[first]} bytes at {addresses[first]} are outside of {whose} memory"
            )

    def devices(self, addresses: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """The device of each address, or the only one there is. Addresses must be in bounds."""
        return int(self._devices[-1]) if self._one_device else self._devices[self._region(addresses)]

    def _region(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, addresses, side="right") - 1


def _base(region: Region) -> int:
    return region.base
