"""Engines added, drained and removed while the router runs, over HTTP, by whoever has the admin key."""

import hmac

import msgspec
from aiohttp import web

from kvpush.router.answers import error_answer
from kvpush.router.change import Change, Changes, What
from kvpush.router.config import EngineRole, RouterConfig
from kvpush.router.fleet import Fleet
from kvpush.router.others import NoAnswer, Others, Question
from kvpush.router.relay import send_answer
from kvpush.router.view import EngineView, joined, view

Views = list[EngineView]


class AddBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Add an engine, written as on the command line; or put a draining one back to work."""

    role: EngineRole
    engine: str


class NameBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name an engine by its URL."""

    engine: str


class Admin:
    """The admin routes, for all processes on one port. Owned by the event loop's thread."""

    def __init__(self, fleet: Fleet, config: RouterConfig, others: Others) -> None:
        self._fleet = fleet
        self._key = config.admin_key
        self._others = others
        self._changes = Changes(fleet, config.place, others)
        others.answers(Question.ENGINES, self._asked_for_engines)

    async def list(self, request: web.Request) -> web.Response:
        """Every engine and what it is doing."""
        if refusal := self._refusal(request):
            return refusal
        try:
            return _answer(joined([self._views(), *await self._others.ask_all(Question.ENGINES, Views)]))
        except NoAnswer as error:
            return send_answer(error.answer, {})

    async def add(self, request: web.Request) -> web.Response:
        """Take one more engine into service."""
        return self._refusal(request) or await self._change(request, What.ADD)

    async def drain(self, request: web.Request) -> web.Response:
        """Send an engine nothing new; what it has goes on."""
        return self._refusal(request) or await self._change(request, What.DRAIN)

    async def remove(self, request: web.Request) -> web.Response:
        """Forget an engine; what it has goes on."""
        return self._refusal(request) or await self._change(request, What.REMOVE)

    async def _change(self, request: web.Request, what: What) -> web.Response:
        body = await request.read()
        try:
            if what is What.ADD:
                added = msgspec.json.decode(body, type=AddBody)
                change = Change(what, added.engine, added.role)
            else:
                change = Change(what, msgspec.json.decode(body, type=NameBody).engine)
        except msgspec.DecodeError as error:
            return _plain(400, str(error))
        outcome = await self._changes.make(change)
        return send_answer(outcome.refusal, {}) if outcome.refusal else _answer(outcome.engine)

    async def _asked_for_engines(self, body: bytes) -> Views:
        return self._views()

    def _views(self) -> Views:
        return [view(engine) for engine in self._fleet.engines()]

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


def _answer(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")


def _plain(status: int, message: str) -> web.Response:
    return send_answer(error_answer(status, message, "invalid_request_error"), {})
