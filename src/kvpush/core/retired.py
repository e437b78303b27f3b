"""What is remembered of ended transfers, so that late messages for them are recognised and refused.

Bounded in time and number. A key that falls out because of the number is as unknown as one that never was:
the bound is chosen so that this takes longer than any message can be late.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.ids import Key
from kvpush.core.mode import Mode


@dataclass(frozen=True)
class Tombstone:
    """How a transfer ended."""

    outcome: Outcome
    reason: Reason
    mode: Mode
    until: float

    @property
    def is_good(self) -> bool:
        """Whether all that was asked for was delivered."""
        return (self.outcome, self.reason) == (Outcome.DELIVERED, Reason.OK)


class Retired:
    """Ended transfers of one side of an endpoint."""

    def __init__(self, memory_s: float, limit: int) -> None:
        self._memory_s = memory_s
        self._limit = limit
        self._stones: OrderedDict[Key, Tombstone] = OrderedDict()

    def add(self, key: Key, outcome: Outcome, reason: Reason, mode: Mode, now: float) -> None:
        """Remember that `key` has ended."""
        self._stones[key] = Tombstone(outcome, reason, mode, now + self._memory_s)
        while self._stones and (len(self._stones) > self._limit or next(iter(self._stones.values())).until <= now):
            self._stones.popitem(last=False)

    def get(self, key: Key) -> Tombstone | None:
        """How `key` ended, None when that is not known (any more)."""
        return self._stones.get(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._stones

    def __len__(self) -> int:
        return len(self._stones)
