"""Deadlines of many things in one heap.

Each thing has one deadline. Moving it later is free (the old entry is put back when it comes up), which is
what a heartbeat does to thousands of leases at once; moving it earlier adds an entry.
"""

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Timers(Generic[T]):
    """`deadline_of` gives a thing's present deadline, or None when it is gone or waits for nothing."""

    def __init__(self, deadline_of: Callable[[T], float | None]) -> None:
        self._deadline_of = deadline_of
        self._heap: list[tuple[float, int, T]] = []
        self._count = 0

    def arm(self, thing: T, deadline: float) -> None:
        """The thing's deadline is new, or earlier than it was."""
        self._count += 1
        heapq.heappush(self._heap, (deadline, self._count, thing))

    def due(self, now: float) -> list[T]:
        """The things whose deadline has come, each once; they have to be armed again."""
        found: dict[T, None] = {}
        while self._heap and self._heap[0][0] <= now:
            _, _, thing = heapq.heappop(self._heap)
            deadline = self._deadline_of(thing)
            if deadline is None or thing in found:
                continue
            if deadline <= now:
                found[thing] = None
            else:
                self.arm(thing, deadline)
        return list(found)

    def earliest(self) -> float | None:
        """The first deadline, or None. Never later than the true one; may be earlier."""
        while self._heap:
            when, _, thing = self._heap[0]
            deadline = self._deadline_of(thing)
            if deadline is not None and deadline <= when:
                return when
            heapq.heappop(self._heap)
            if deadline is not None:
                self.arm(thing, deadline)
        return None
