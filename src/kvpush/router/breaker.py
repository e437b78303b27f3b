"""A circuit breaker as a table: three states, three inputs, time as an argument.

    CLOSED  --fault x `faults`-->  OPEN  --`pause_s` has passed, one leg is let through-->  TRYING
    TRYING  --success-->  CLOSED          TRYING  --fault-->  OPEN, for twice as long

Only faults of the engine count; what a client did wrong never does.
"""

from enum import StrEnum

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
FAULTS = 3


class BreakerState(StrEnum):
    """Whether legs may go to an engine."""

    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"


class Breaker:
    """`now` is a monotonic clock in seconds."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._faults = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0

    def allows(self, now: float) -> bool:
        """Whether a leg may be sent. While TRYING, only when the last try has been silent for a whole pause."""
        return self.state is BreakerState.CLOSED or now >= self._until

    def sent(self, now: float) -> None:
        """A leg is on its way."""
        if self.state is not BreakerState.CLOSED and now >= self._until:
            self.state, self._until = BreakerState.TRYING, now + self._pause_s

    def succeeded(self) -> None:
        """A leg has ended well."""
        self.state, self._faults, self._pause_s = BreakerState.CLOSED, 0, FIRST_PAUSE_S

    def failed(self, now: float) -> None:
        """A leg has ended through the engine's fault."""
        self._faults += 1
        if self.state is BreakerState.TRYING:
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        elif self._faults < FAULTS:
            return
        self.state, self._until = BreakerState.OPEN, now + self._pause_s
