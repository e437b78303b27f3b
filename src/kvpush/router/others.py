"""What router processes on one port ask each other: HTTP over UNIX sockets (place.py says where).

Only what is asked rarely goes this way: metrics, health, changes by an operator. A worker that does not answer in time
is an error and no gap: to Prometheus, a sum that lacks one worker would look like a restart.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp import web

from kvpush.router.answers import RequestRefused, error_answer
from kvpush.router.place import Place

ANSWER_S = 2.0
"""How long a worker may take for its own part. Prometheus waits 10 s for a page by default."""

_STOP_S = 0.1

Answerer = Callable[[bytes], Awaitable[object]]
T = TypeVar("T")


class Question(StrEnum):
    """What a worker may be asked."""

    TALLY = "tally"  # what it has counted
    PROBLEMS = "problems"  # why it cannot serve
    ENGINES = "engines"
    APPLY = "apply"  # a change of the fleet, by the worker itself
    CHANGE = "change"  # the same by all workers; only the first one is asked this


class NoAnswer(RequestRefused):
    """A worker has not answered; the client gets 503."""

    def __init__(self, number: int, why: str) -> None:
        self.problem = f"worker {number} of this router does not answer: {why}"
        super().__init__(error_answer(503, self.problem, "service_unavailable"))


class Others:
    """Owned by the event loop's thread. A worker that is alone asks nobody and is asked by nobody."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._answerers: dict[str, Answerer] = {}
        self._runner: web.AppRunner | None = None

    def answers(self, question: Question, answerer: Answerer) -> None:
        """Let `answerer` answer this question, from its body. Say so before `start`."""
        self._answerers[question] = answerer

    async def start(self) -> None:
        """Begin to answer."""
        if not self._place.others:
            return
        app = web.Application()
        app.router.add_post("/{question}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
        await self._runner.setup()
        await web.UnixSite(self._runner, self._place.questions(self._place.number)).start()

    async def aclose(self) -> None:
        """Answer no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def ask(
        self, number: int, question: Question, kind: type[T], body: bytes = b"", within_s: float = ANSWER_S
    ) -> T:
        """One worker's answer. Raises `NoAnswer`."""
        connector = aiohttp.UnixConnector(self._place.questions(number))
        timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, raise_for_status=True) as session,
                session.post(f"http://worker/{question}", data=body) as response,
            ):
                return msgspec.msgpack.decode(await response.read(), type=kind)
        except TimeoutError:
            raise NoAnswer(number, f"nothing within {within_s:g} s") from None
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise NoAnswer(number, str(error)) from None

    async def ask_each(self, question: Question, kind: type[T], body: bytes = b"") -> list[T | NoAnswer]:
        """What each of the others says, or that it says nothing."""
        asked = [self.ask(number, question, kind, body) for number in self._place.others]
        found: list[T | NoAnswer] = []
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, NoAnswer):
                raise answer
            found.append(answer)
        return found

    async def ask_all(self, question: Question, kind: type[T], body: bytes = b"") -> list[T]:
        """What all of the others say; each has been asked before this raises `NoAnswer`."""
        found: list[T] = []
        for answer in await self.ask_each(question, kind, body):
            if isinstance(answer, NoAnswer):
                raise answer
            found.append(answer)
        return found

    async def _answer(self, request: web.Request) -> web.Response:
        answerer = self._answerers[request.match_info["question"]]
        return web.Response(body=msgspec.msgpack.encode(await answerer(await request.read())))
