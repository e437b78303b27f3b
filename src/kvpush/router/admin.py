"""Engines added, drained and removed while the router runs, over HTTP, by whoever has the admin key."""

import hmac
import time

import msgspec
from aiohttp import web

from kvpush.core.errors import ConfigError
from kvpush.router.answers import error_answer
from kvpush.router.config import EngineRole, parse_engine, parse_url
from kvpush.router.engine import Duty, Engine
from kvpush.router.fleet import Fleet
from kvpush.router.relay import send_answer


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as `GET /admin/engines` shows it."""

    role: EngineRole
    url: str
    duty: Duty
    breaker: str
    takes_legs: bool
    problem: str
    requests: int
    tokens: int
    unwritten_tokens: int
    engine_id: str | None
    control: str | None


class AddBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Add an engine, written as on the command line; or put a draining one back to work."""

    role: EngineRole
    engine: str


class NameBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name an engine by its URL."""

    engine: str


class Admin:
    """The admin routes. Owned by the event loop's thread."""

    def __init__(self, fleet: Fleet, key: str) -> None:
        self._fleet = fleet
        self._key = key

    async def list(self, request: web.Request) -> web.Response:
        """Every engine and what it is doing."""
        return self._refusal(request) or _answer([view(engine) for engine in self._fleet.engines()])

    async def add(self, request: web.Request) -> web.Response:
        """Take one more engine into service."""
        if refusal := self._refusal(request):
            return refusal
        try:
            body = msgspec.json.decode(await request.read(), type=AddBody)
            return _answer(view(self._fleet.add(parse_engine(body.engine), body.role)))
        except (msgspec.DecodeError, ConfigError) as error:
            return _bad(error)

    async def drain(self, request: web.Request) -> web.Response:
        """Send an engine nothing new; what it has goes on."""
        if refusal := self._refusal(request):
            return refusal
        try:
            engine = self._fleet.find(await _named(request))
        except (msgspec.DecodeError, ConfigError) as error:
            return _bad(error)
        engine.duty = Duty.DRAINING
        return _answer(view(engine))

    async def remove(self, request: web.Request) -> web.Response:
        """Forget an engine; what it has goes on."""
        if refusal := self._refusal(request):
            return refusal
        try:
            return _answer(view(self._fleet.remove(await _named(request))))
        except (msgspec.DecodeError, ConfigError) as error:
            return _bad(error)

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not self._key:
            return _plain(403, "The admin API is off. Start the router with an admin key to use it.")
        if not has_key(request, (self._key,)):
            return _plain(401, "The admin key is missing or wrong. Send it as 'Authorization: Bearer KEY'.")
        return None


def has_key(request: web.Request, keys: tuple[str, ...]) -> bool:
    """Whether a request carries one of the keys; takes the same time whichever it is."""
    sent = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    return sum(hmac.compare_digest(sent, key.encode()) for key in keys) > 0


def view(engine: Engine) -> EngineView:
    """An engine for people."""
    identity = engine.identity
    return EngineView(
        role=engine.role,
        url=engine.url,
        duty=engine.duty,
        breaker=engine.breaker.state,
        takes_legs=engine.sample is not None and engine.duty is Duty.ON and engine.breaker.allows(time.monotonic()),
        problem=engine.problem,
        requests=engine.requests,
        tokens=engine.tokens,
        unwritten_tokens=engine.unwritten_tokens,
        engine_id=identity.target.engine_id if identity else None,
        control=str(identity.target.address) if identity else None,
    )


async def _named(request: web.Request) -> str:
    return parse_url(msgspec.json.decode(await request.read(), type=NameBody).engine)


def _answer(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")


def _bad(error: Exception) -> web.Response:
    return _plain(400, str(error))


def _plain(status: int, message: str) -> web.Response:
    return send_answer(error_answer(status, message, "invalid_request_error"), {})
