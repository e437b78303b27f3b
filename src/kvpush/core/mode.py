"""Who moves the bytes: the sender writes (push), or the receiver reads (pull). Pure values, and the choice of one.

Pairs can differ a hundredfold between the two: a READ may fall to a slower path than a WRITE, or the other way about.
So where both are possible, both are tried with the first transfers that are large enough to tell.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """Who posts: the sender a WRITE, or the receiver a READ."""

    PUSH = "push"
    PULL = "pull"


class ModeSetting(StrEnum):
    """What a user can ask an engine for."""

    PUSH = "push"
    PULL = "pull"
    AUTO = "auto"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that such an engine takes part in."""
        return tuple(Mode) if self is ModeSetting.AUTO else (Mode(self.value),)


MEASURED_BYTES = 1 << 20
"""Smaller transfers say more of wake-ups than of the wire."""
SAMPLES = 2
"""The first transfer between two processes sets up connections, too: the better of the first two counts."""
MARGIN = 1.25
"""Push has one message less between the last token and the data: pull must be this much faster to be chosen."""


@dataclass
class Rates:
    """What was measured of one pair: bytes per second by mode, the best of `samples` transfers each."""

    best: dict[Mode, float] = field(default_factory=dict)
    samples: dict[Mode, int] = field(default_factory=dict)

    def note(self, mode: Mode, nbytes: int, seconds: float) -> bool:
        """A transfer has taken so long. Returns whether that completes the measurement."""
        if nbytes < MEASURED_BYTES or seconds <= 0:
            return False
        before = self.settled
        self.best[mode] = max(self.best.get(mode, 0.0), nbytes / seconds)
        self.samples[mode] = self.samples.get(mode, 0) + 1
        return self.settled and not before

    @property
    def settled(self) -> bool:
        """Whether both modes have been measured."""
        return all(self.samples.get(mode, 0) >= SAMPLES for mode in Mode)

    def choose(self, possible: Collection[Mode], nbytes: int) -> Mode:
        """The mode of the next transfer, of `nbytes`."""
        if len(possible) == 1:
            return next(iter(possible))
        if not self.settled and nbytes >= MEASURED_BYTES:
            return min(Mode, key=lambda mode: self.samples.get(mode, 0))
        push, pull = (self.best.get(mode, 0.0) for mode in Mode)
        return Mode.PULL if self.settled and pull > MARGIN * push else Mode.PUSH


def agree(ours: Collection[Mode], theirs: Collection[Mode]) -> tuple[Mode, ...]:
    """The modes that two engines have in common, push first."""
    return tuple(mode for mode in Mode if mode in ours and mode in theirs)


def in_words(modes: Collection[Mode]) -> str:
    """For error messages."""
    return " and ".join(mode for mode in Mode if mode in modes) or "nothing"
