"""Router processes ask each other: real sockets, one loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest

from kvpush.router.others import NoAnswer, Others, Question
from kvpush.router.place import Place, meeting_places


async def echo(body: bytes) -> str:
    return body.decode()


@asynccontextmanager
async def workers(places: list[Place]) -> AsyncIterator[list[Others]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(aclosing(Others(place))) for place in places]
        for one in found:
            one.answers(Question.TALLY, echo)
            await one.start()
        yield found


async def test_each_worker_can_ask_all_others() -> None:
    with meeting_places(3) as places:
        async with workers(places) as found:
            for one in found:
                assert await one.ask_all(Question.TALLY, str, b"you?") == ["you?", "you?"]


async def test_worker_that_is_alone_asks_nobody() -> None:
    async with workers([Place()]) as (one,):
        assert await one.ask_all(Question.TALLY, str) == []


async def test_worker_that_is_not_there_is_named_and_the_others_are_asked_all_the_same() -> None:
    with meeting_places(3) as places:
        async with workers([places[0], places[2]]) as (one, _):
            silence, answer = await one.ask_each(Question.TALLY, str, b"you?")
            with pytest.raises(NoAnswer):
                await one.ask_all(Question.TALLY, str)
    assert answer == "you?"
    assert isinstance(silence, NoAnswer)
    assert silence.problem.startswith("worker 1 of this router does not answer: Cannot connect")
    assert silence.answer.status == 503


async def test_worker_that_is_stuck_is_not_waited_for_longer_than_was_said() -> None:
    stuck = asyncio.Event()

    async def never(body: bytes) -> None:
        await stuck.wait()

    with meeting_places(2) as places:
        async with workers(places) as (one, other):
            other.answers(Question.PROBLEMS, never)
            with pytest.raises(NoAnswer, match=r"worker 1 of this router does not answer: nothing within 0.1 s"):
                await one.ask(1, Question.PROBLEMS, list[str], within_s=0.1)
            stuck.set()


async def test_answer_of_another_kind_than_expected_is_none() -> None:
    with meeting_places(2) as places:
        async with workers(places) as (one, _):
            with pytest.raises(NoAnswer, match="Expected `int`, got `str`"):
                await one.ask(1, Question.TALLY, int, b"text")


async def test_worker_that_has_failed_to_answer_is_no_answer() -> None:
    async def breaks(body: bytes) -> None:
        raise RuntimeError

    with meeting_places(2) as places:
        async with workers(places) as (one, other):
            other.answers(Question.PROBLEMS, breaks)
            with pytest.raises(NoAnswer, match="500"):
                await one.ask(1, Question.PROBLEMS, list[str])
