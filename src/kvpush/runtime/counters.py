"""Counters of transfers: merged over ranks and intervals, pickled between processes, exported by an adapter.

Nothing here knows of vLLM or Prometheus. Added up on the thread that drains the events.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Self

import msgspec

from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Ended, Event, ModeChosen, Outcome, PeerChanged, Purpose, Role, TransferRecord
from kvpush.core.mode import Mode

BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms' buckets in seconds; one more bucket holds what is longer."""

STAGES: dict[Role, tuple[tuple[str, str, str], ...]] = {
    Role.RECEIVER: (
        ("admission", "expected", "requested"),
        ("prefill_wait", "expected", "begun"),
        ("registration", "requested", "accepted"),
        ("transfer", "accepted", "noticed"),
        ("offer", "accepted", "offered"),
        ("read", "posted", "read"),
        ("confirm", "read", "ended"),
        ("total", "requested", "ended"),
    ),
    Role.SENDER: (
        ("prefill", "announced", "final"),
        ("lead", "registered", "final"),
        ("match", "final", "posted"),
        ("write", "posted", "written"),
        ("lent", "offered", "released"),
        ("total", "announced", "ended"),
    ),
}
"""The durations that are measured per role: name, first stage, last stage (see `TransferRecord.at`). A transfer that
lacks one of the two stages, or had them the other way round, does not count there; `sender lead` is how long before
the prompt was final the receiver had registered. The receiver's offer, read and confirm, and the sender's lent, are
of transfers by pull."""


class Histogram(msgspec.Struct):
    """Durations in seconds: how many fell into each bucket, and their sum."""

    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """How many durations there are."""
        return sum(self.buckets)

    def observe(self, seconds: float) -> None:
        """Add one duration."""
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def merge(self, other: "Histogram") -> None:
        """Add all of another's durations."""
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        self.sum_s += other.sum_s


class Volume(msgspec.Struct):
    """What delivered transfers have moved. `reused`: tokens of it that the receiver would have computed itself.
    `idle_block_s`: for how many seconds how many of a receiver's blocks were set aside and not written in full yet,
    whatever became of them."""

    tokens: int = 0
    nbytes: int = 0
    descriptors: int = 0
    reused: int = 0
    idle_block_s: float = 0.0

    def merge(self, other: "Volume") -> None:
        """Add another's."""
        self.tokens += other.tokens
        self.nbytes += other.nbytes
        self.descriptors += other.descriptors
        self.reused += other.reused
        self.idle_block_s += other.idle_block_s


class Counters(msgspec.Struct):
    """Everything counted since the last `take`."""

    transfers: dict[tuple[Role, Outcome, Reason], int] = msgspec.field(default_factory=dict)
    counted: dict[tuple[str, Reason], int] = msgspec.field(default_factory=dict)
    volumes: dict[Role, Volume] = msgspec.field(default_factory=dict)
    seconds: dict[tuple[Role, str], Histogram] = msgspec.field(default_factory=dict)
    modes: dict[tuple[Role, Mode], int] = msgspec.field(default_factory=dict)
    pairs: dict[str, ModeChosen] = msgspec.field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Count one event; those that are no matter of counting are ignored."""
        match event:
            case Ended(record):
                self._add_record(record)
            case Counted(name, reason, amount):
                self.counted[name, reason] = self.counted.get((name, reason), 0) + amount
            case ModeChosen(peer):
                self.pairs[peer] = event
            case PeerChanged(_, True, reason):  # that one was lost comes as a Counted of its own
                self.counted["peer_ready", reason] = self.counted.get(("peer_ready", reason), 0) + 1

    def add_all(self, events: Iterable[Event]) -> None:
        """Count several events."""
        for event in events:
            self.add(event)

    def _add_record(self, record: TransferRecord) -> None:
        how = (record.role, record.outcome, record.reason)
        self.transfers[how] = self.transfers.get(how, 0) + 1
        if record.role is Role.RECEIVER and "requested" in record.at:
            idle_s = record.at["ended"] - record.at["requested"]
            self.volumes.setdefault(record.role, Volume()).merge(Volume(idle_block_s=record.blocks * idle_s))
        if record.outcome is Outcome.DELIVERED:
            reused = record.tokens if record.purpose is Purpose.CONVERSATION else 0
            moved = Volume(record.tokens, record.nbytes, record.descriptors, reused)
            self.volumes.setdefault(record.role, Volume()).merge(moved)
            if record.reason is Reason.OK:
                moved_by = (record.role, record.mode)
                self.modes[moved_by] = self.modes.get(moved_by, 0) + 1
            self._add_stages(record)

    def _add_stages(self, record: TransferRecord) -> None:
        for name, first, last in STAGES[record.role]:
            if first in record.at and record.at.get(last, -1.0) >= record.at[first]:
                duration = record.at[last] - record.at[first]
                self.seconds.setdefault((record.role, name), Histogram()).observe(duration)

    def merge(self, other: "Counters") -> None:
        """Add everything another has counted."""
        for how, number in other.transfers.items():
            self.transfers[how] = self.transfers.get(how, 0) + number
        for what, number in other.counted.items():
            self.counted[what] = self.counted.get(what, 0) + number
        for role, volume in other.volumes.items():
            self.volumes.setdefault(role, Volume()).merge(volume)
        for stage, histogram in other.seconds.items():
            self.seconds.setdefault(stage, Histogram()).merge(histogram)
        for moved_by, number in other.modes.items():
            self.modes[moved_by] = self.modes.get(moved_by, 0) + number
        self.pairs |= other.pairs

    def take(self) -> "Counters":
        """Everything so far; starts again from nothing."""
        taken = Counters(*(getattr(self, field) for field in self.__struct_fields__))
        for field in self.__struct_fields__:
            setattr(self, field, {})
        return taken

    @property
    def empty(self) -> bool:
        """Whether nothing has been counted."""
        counted = self.transfers or self.counted or self.volumes or self.seconds or self.modes or self.pairs
        return not counted

    def to_plain(self) -> dict[str, object]:
        """Lists, strings and numbers only, for any serializer; see `from_plain`."""
        return {field: msgspec.to_builtins(list(getattr(self, field).items())) for field in self.__struct_fields__}

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Read what `to_plain` has made. Raises `msgspec.ValidationError`."""
        pairs = msgspec.convert(plain, _Pairs)
        return cls(*(dict(getattr(pairs, field)) for field in cls.__struct_fields__))


class _Pairs(msgspec.Struct):
    transfers: list[tuple[tuple[Role, Outcome, Reason], int]]
    counted: list[tuple[tuple[str, Reason], int]]
    volumes: list[tuple[Role, Volume]]
    seconds: list[tuple[tuple[Role, str], Histogram]]
    modes: list[tuple[tuple[Role, Mode], int]]
    pairs: list[tuple[str, ModeChosen]]
