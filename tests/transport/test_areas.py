"""Bounds and devices of registered memory."""

import numpy as np
import pytest

from kvpush.core.errors import TransportError
from kvpush.core.layout import Region
from kvpush.transport.areas import Areas

REGIONS = (Region(1000, 100, 3), Region(500, 100, 1), Region(1100, 50, 2))


def check(address: int, nbytes: int) -> None:
    Areas(REGIONS).check(np.array([500, address]), np.array([1, nbytes]), "our")


@pytest.mark.parametrize(("address", "nbytes"), [(500, 100), (599, 1), (1000, 100), (1100, 50), (1149, 1)])
def test_run_inside_of_a_region_is_taken(address: int, nbytes: int) -> None:
    check(address, nbytes)


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(499, 1), (599, 2), (600, 1), (999, 1), (1099, 2), (1000, 150), (1150, 1), (0, 1), (-5, 1), (700, 0), (510, -1)],
)
def test_run_outside_of_the_regions_or_across_two_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(TransportError, match=f"descriptor 1: {nbytes} bytes at {address} are outside of our memory"):
        check(address, nbytes)


def test_nothing_is_inside_of_no_regions() -> None:
    Areas(()).check(np.empty(0, np.int64), np.empty(0, np.int64), "our")
    with pytest.raises(TransportError, match="outside"):
        Areas(()).check(np.array([1]), np.array([1]), "our")


def test_devices_follow_the_regions() -> None:
    assert list(np.atleast_1d(Areas(REGIONS).devices(np.array([1000, 599, 1149, 1099])))) == [3, 1, 2, 3]


def test_one_device_is_named_once() -> None:
    assert Areas(REGIONS[:1]).devices(np.array([1000, 1001])) == 3


@pytest.mark.parametrize(
    "region", [Region(-1, 10), Region(10, 0), Region(10, -1), Region(1 << 63, 1), Region(1, 1 << 62)]
)
def test_region_that_is_no_memory_is_refused(region: Region) -> None:
    with pytest.raises(TransportError, match="no memory area"):
        Areas((REGIONS[0], region))
