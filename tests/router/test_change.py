"""Changes of the fleet, by the first of two workers; the test plays the second."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from kvpush.router.answers import error_answer
from kvpush.router.change import Change, Changes, Outcome, What
from kvpush.router.config import RouterConfig, parse_engine
from kvpush.router.fleet import Fleet
from kvpush.router.others import Answerer, Others, Question
from kvpush.router.place import meeting_places
from kvpush.router.upstream import Upstream

D = "http://127.0.0.1:9"
DRAIN, AGAIN, REMOVE = Change(What.DRAIN, D), Change(What.ADD, D), Change(What.REMOVE, D)
UNKNOWN = Outcome(refusal=error_answer(400, "not known here", "invalid_request_error"))


async def nothing(body: bytes) -> None:
    pass


@asynccontextmanager
async def first_of_two(apply: Answerer) -> AsyncIterator[tuple[Changes, Others]]:
    """The first worker's changes, and its way to the second, which answers with `apply`."""
    config = RouterConfig(prefill=(parse_engine("http://127.0.0.1:8"),), decode=(parse_engine(D),))
    upstream = Upstream(config)
    with meeting_places(2) as (ours, theirs):
        async with (
            aclosing(Fleet(config, upstream)) as fleet,
            aclosing(Others(ours)) as others,
            aclosing(Others(theirs)) as second,
        ):
            second.answers(Question.APPLY, apply)
            second.answers(Question.PROBLEMS, nothing)
            await second.start()
            fleet.start()
            yield Changes(fleet, ours, others), others
    upstream.close()


async def test_next_change_begins_when_all_have_made_the_one_before() -> None:
    heard: list[Change] = []
    may_end = asyncio.Event()

    async def apply(body: bytes) -> Outcome:
        heard.append(msgspec.msgpack.decode(body, type=Change))
        await may_end.wait()
        return Outcome()

    async with first_of_two(apply) as (changes, others):
        made = [asyncio.create_task(changes.make(change)) for change in (DRAIN, AGAIN)]
        for _ in range(5):  # as many questions of ours are answered as the second change would have taken, and more
            await others.ask(1, Question.PROBLEMS, type(None))
        assert heard == [DRAIN]
        may_end.set()
        await asyncio.gather(*made)
        assert heard == [DRAIN, AGAIN]


async def not_known(body: bytes) -> Outcome:
    return UNKNOWN


async def test_engine_that_a_worker_did_not_know_is_removed_where_another_did() -> None:
    async with first_of_two(not_known) as (changes, _):
        outcome = await changes.make(REMOVE)
        assert outcome.refusal is None
        assert outcome.engine is not None
        again = await changes.make(REMOVE)
        assert (again.engine, again.refusal is None) == (None, False)


@pytest.mark.parametrize("change", [DRAIN, AGAIN], ids=lambda change: change.what)
async def test_change_that_one_worker_refuses_is_refused(change: Change) -> None:
    async with first_of_two(not_known) as (changes, _):
        assert await changes.make(change) == UNKNOWN
