"""Changes of the fleet while the router runs, made by all processes on one port.

A client's change reaches one process, whichever the kernel chose. That one passes it to the first process, which has it
carried out by all, one change after the other: so all see the same changes in the same order. Each change can be
asked for again, which is what to do when a worker has not answered.
"""

import asyncio
from enum import StrEnum
from typing import assert_never

import msgspec

from kvpush.core.errors import ConfigError
from kvpush.router.answers import Answer, error_answer
from kvpush.router.config import EngineRole, parse_engine, parse_url
from kvpush.router.engine import Duty, Engine
from kvpush.router.fleet import Fleet
from kvpush.router.others import ANSWER_S, NoAnswer, Others, Question
from kvpush.router.place import Place
from kvpush.router.view import EngineView, joined, view

_FIRST = 0
_ALL_ANSWER_S = 3 * ANSWER_S
"""The first one may have to wait for another change, and for a worker that is silent."""


class What(StrEnum):
    """What can be done with an engine."""

    ADD = "add"  # take it into service, again if it was draining
    DRAIN = "drain"  # send it nothing new
    REMOVE = "remove"  # forget it; in both cases what it has goes on


class Change(msgspec.Struct, frozen=True):
    """`engine` is written as on the command line to add it, and else its URL."""

    what: What
    engine: str
    role: EngineRole = EngineRole.DECODE


class Outcome(msgspec.Struct, frozen=True):
    """The engine as it is now, or why it is as it was, or may be."""

    engine: EngineView | None = None
    refusal: Answer | None = None


class Changes:
    """Owned by the event loop's thread."""

    def __init__(self, fleet: Fleet, place: Place, others: Others) -> None:
        self._fleet = fleet
        self._place = place
        self._others = others
        self._turn = asyncio.Lock()
        others.answers(Question.APPLY, self._asked_to_apply)
        others.answers(Question.CHANGE, self._asked_for_all)

    async def make(self, change: Change) -> Outcome:
        """Have a change carried out by all; a worker that is silent, and may not have done so, is a refusal."""
        body = msgspec.msgpack.encode(change)
        try:
            if not self._place.is_first:
                return await self._others.ask(_FIRST, Question.CHANGE, Outcome, body, within_s=_ALL_ANSWER_S)
            async with self._turn:
                ours = self._apply(change)
                return _joined(change, [ours, *await self._others.ask_all(Question.APPLY, Outcome, body)])
        except NoAnswer as silence:
            return Outcome(refusal=silence.answer)

    def _apply(self, change: Change) -> Outcome:
        try:
            return Outcome(view(self._carry_out(change)))
        except ConfigError as error:
            return Outcome(refusal=error_answer(400, str(error), "invalid_request_error"))

    def _carry_out(self, change: Change) -> Engine:
        match change.what:
            case What.ADD:
                return self._fleet.add(parse_engine(change.engine), change.role)
            case What.REMOVE:
                return self._fleet.remove(parse_url(change.engine))
            case What.DRAIN:
                engine = self._fleet.find(parse_url(change.engine))
                engine.duty = Duty.DRAINING
                return engine
            case _:
                assert_never(change.what)

    async def _asked_to_apply(self, body: bytes) -> Outcome:
        return self._apply(msgspec.msgpack.decode(body, type=Change))

    async def _asked_for_all(self, body: bytes) -> Outcome:
        return await self.make(msgspec.msgpack.decode(body, type=Change))


def _joined(change: Change, outcomes: list[Outcome]) -> Outcome:
    """All must have done it, but an engine that some did not know any more is as good as removed by them."""
    engines = [outcome.engine for outcome in outcomes if outcome.engine is not None]
    refusal = next((outcome.refusal for outcome in outcomes if outcome.refusal is not None), None)
    if engines and (refusal is None or change.what is What.REMOVE):
        return Outcome(joined([engine] for engine in engines)[0])
    return Outcome(refusal=refusal)
