"""What one router process has counted, as a frozen value, and how the tallies of several become one."""

from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client.core import Metric

from kvpush.router import view
from kvpush.router.view import EngineView

_CREATED = "_created"


class Count(msgspec.Struct, frozen=True, array_like=True):
    """One series of a counter or histogram: `family` is its metric's name, `name` its own."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """`waiting`: requests in the router without a decode engine."""

    engines: list[EngineView]
    waiting: int
    counts: list[Count]


def counts_of(families: Iterable[Metric]) -> list[Count]:
    """The series of counters and histograms."""
    return [
        Count(family.name, sample.name, tuple(sample.labels.items()), sample.value)
        for family in families
        for sample in family.samples
    ]


def joined(tallies: Sequence[Tally]) -> Tally:
    """One tally for all processes on one port."""
    return Tally(
        view.joined(tally.engines for tally in tallies),
        sum(tally.waiting for tally in tallies),
        _added(count for tally in tallies for count in tally.counts),
    )


def _added(counts: Iterable[Count]) -> list[Count]:
    """Counters and buckets add up; what began first says since when."""
    total: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for count in counts:
        series = (count.family, count.name, count.labels)
        if series not in total:
            total[series] = count.value
        elif count.name.endswith(_CREATED):
            total[series] = min(total[series], count.value)
        else:
            total[series] += count.value
    return [Count(*series, value) for series, value in total.items()]
