"""What can go wrong on a data plane, and when: from a script, or from a seed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Protocol

from kvpush.core.errors import ConfigError


class Point(StrEnum):
    """Where faults happen. Occurrences of each point are counted from 0, per transport."""

    ADD_PEER = "add_peer"
    WRITE = "write"
    READ = "read"
    NOTICE = "notice"


class FaultKind(StrEnum):
    """What goes wrong. `polls` counts calls of the faulty transport's `poll`."""

    ADD_PEER_FAILS = "add_peer_fails"
    POST_RAISES = "post_raises"
    WRITE_FAILS = "write_fails"  # nothing is written; reported as failed `polls` later
    WRITE_TORN = "write_torn"  # the first half of the descriptors is written, then it is reported as failed
    WRITE_LATE = "write_late"  # posted `polls` later than we were told
    WRITE_STUCK = "write_stuck"  # neither written nor reported, until the peer is removed
    DONE_LATE = "done_late"  # reported `polls` after it was done: the peer has the notice long before
    READ_RAISES = "read_raises"
    READ_FAILS = "read_fails"  # the same of a READ
    READ_TORN = "read_torn"
    READ_LATE = "read_late"
    READ_STUCK = "read_stuck"
    NOTICE_LOST = "notice_lost"
    NOTICE_TWICE = "notice_twice"  # the second time `polls` later
    NOTICE_LATE = "notice_late"

    @property
    def point(self) -> Point:
        """Where this happens."""
        if self is FaultKind.ADD_PEER_FAILS:
            return Point.ADD_PEER
        if self.name.startswith("READ"):
            return Point.READ
        return Point.NOTICE if self.name.startswith("NOTICE") else Point.WRITE


@dataclass(frozen=True)
class Fault:
    """One fault. `nth` is the occurrence of its point that it hits, None hits each one."""

    kind: FaultKind
    nth: int | None = 0
    polls: int = 3


class Faults(Protocol):
    """Decides what goes wrong."""

    def at(self, point: Point) -> Fault | None:
        """Called once per occurrence of a point, in order."""


class Script:
    """Exactly these faults. The first that matches an occurrence is taken."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self._seen: Counter[Point] = Counter()

    def at(self, point: Point) -> Fault | None:
        """The fault written down for this occurrence."""
        occurrence = self._seen[point]
        self._seen[point] += 1
        return next(
            (each for each in self._faults if each.kind.point is point and each.nth in (occurrence, None)), None
        )


class Seeded:
    """Each kind with its own probability per occurrence of its point; the same seed gives the same faults."""

    def __init__(self, seed: int, rates: Mapping[FaultKind, float], max_polls: int = 8) -> None:
        """Raises `ConfigError` when the rates of one point add up to more than 1."""
        self._random = Random(seed)
        self._rates = {point: {k: rate for k, rate in rates.items() if k.point is point} for point in Point}
        self._max_polls = max_polls
        for point, kinds in self._rates.items():
            if sum(kinds.values()) > 1 or min(kinds.values(), default=0) < 0:
                raise ConfigError("rates", f"{kinds} of {point} are no probabilities", "Let them add up to at most 1.")

    def at(self, point: Point) -> Fault | None:
        """Draw, even where no fault has a rate, so that rates of other points change nothing here."""
        drawn, polls = self._random.random(), self._random.randint(1, self._max_polls)
        for kind, rate in self._rates[point].items():
            if drawn < rate:
                return Fault(kind, None, polls)
            drawn -= rate
        return None
