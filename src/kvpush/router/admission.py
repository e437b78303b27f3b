"""Who may start on a decode engine, and who waits in the router.

A decode engine sets blocks aside for a whole prompt as soon as its leg arrives, long before the KV does. Too many of
them starve the requests that are decoding, so what is promised but not yet written is bounded for each engine to a
part of its KV pool, and the rest waits here in order of arrival.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

from kvpush.router.answers import RequestRefused, error_answer
from kvpush.router.asked import Asked
from kvpush.router.engine import Engine, Seat
from kvpush.router.picker import pick


class Admission:
    """Owned by the event loop's thread. `room` is the event that all engines set when promises shrink."""

    def __init__(self, room: asyncio.Event, unwritten_fraction: float, max_waiting: int, timeout_s: float) -> None:
        self._room = room
        self._fraction = unwritten_fraction
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._rng = random.Random()
        self.waiting = 0

    async def seat(self, asked: Asked, engines: Callable[[], Sequence[Engine]]) -> Seat | None:
        """A seat on the best engine that has room, when it is this request's turn; None without engines.

        Raises `RequestRefused` (503) when too many wait already, or the wait is too long.
        """
        if not self._turn.locked():
            # nobody is waiting: most requests of a router that is not overloaded need no turn
            usable = engines()
            if not usable:
                return None
            if chosen := self._with_room(asked, usable):
                return chosen.admit(asked)
        if self.waiting >= self._max_waiting:
            raise RequestRefused(error_answer(503, "Too many requests wait for a decode engine.", "overloaded"))
        self.waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                return await self._wait_for_room(asked, engines)
        except TimeoutError:
            answer = error_answer(503, f"No decode engine had room within {self._timeout_s:g} s.", "overloaded")
            raise RequestRefused(answer) from None
        finally:
            self.waiting -= 1

    async def _wait_for_room(self, asked: Asked, engines: Callable[[], Sequence[Engine]]) -> Seat | None:
        while True:
            self._room.clear()
            usable = engines()
            if not usable:
                return None
            chosen = self._with_room(asked, usable)
            if chosen is not None:
                return chosen.admit(asked)
            await self._room.wait()

    def _with_room(self, asked: Asked, engines: Sequence[Engine]) -> Engine | None:
        return pick([engine for engine in engines if self._has_room(engine, asked)], asked, self._rng)

    def _has_room(self, engine: Engine, asked: Asked) -> bool:
        if engine.unwritten_tokens == 0 or engine.pool_tokens is None:
            return True
        return engine.unwritten_tokens + asked.tokens <= self._fraction * engine.pool_tokens
