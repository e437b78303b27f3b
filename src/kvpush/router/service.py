"""What the routes do. One instance serves one process; owned by the event loop's thread."""

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from aiohttp import web

from kvpush.router.answers import Answer, LegFailed, RequestRefused, error_answer
from kvpush.router.asked import parse_asked
from kvpush.router.body import Route
from kvpush.router.config import EngineRole, RouterConfig
from kvpush.router.connectors import local_reason
from kvpush.router.dispatcher import Dispatcher
from kvpush.router.fleet import Fleet
from kvpush.router.metrics import Ending, Metrics, Path
from kvpush.router.pair import Delivery, Dispatch
from kvpush.router.relay import relay_body, send_answer, send_stream
from kvpush.router.upstream import Upstream

logger = logging.getLogger(__name__)

_PASSED_ON = ("traceparent", "tracestate", "accept-language")
PATH_HEADER = "x-kvpush-path"
TRANSFER_HEADER = "x-kvpush-transfer-id"


class Service:
    """Make it inside the running loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics_ = Metrics()
        self.upstream = Upstream(config)
        self.fleet = Fleet(config, self.upstream)
        self.dispatcher = Dispatcher(config, self.fleet, self.upstream)

    def start(self) -> None:
        """Begin to watch the engines."""
        self.fleet.start()

    async def aclose(self) -> None:
        """Stop watching, close every connection."""
        await self.fleet.aclose()
        await self.upstream.aclose()

    async def health(self, request: web.Request) -> web.Response:
        """200 when a request could be served now; else 503 and the reasons."""
        problems = self.fleet.problems()
        body = msgspec.json.encode({"ready": not problems, "problems": problems})
        return web.Response(status=503 if problems else 200, body=body, content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        engines = [engine for role in EngineRole for engine in self.fleet.of(role)]
        page = self.metrics_.page(engines)
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Completions and chat completions."""
        trail: list[Dispatch] = []
        try:
            asked = parse_asked(Route(request.path), await read_body(request))
            delivery = await self.dispatcher.open(asked, self._headers(request), trail)
        except RequestRefused as refused:
            return self._refuse(request, refused.answer, trail, Ending.REFUSED)
        except LegFailed as failure:
            return self._refuse(request, failure.answer, trail, Ending.REFUSED)
        except asyncio.CancelledError:
            self._count(trail, Ending.CLIENT_LEFT)
            raise
        return await self._deliver(request, delivery, trail)

    def _refuse(self, request: web.Request, answer: Answer, trail: list[Dispatch], ending: Ending) -> web.Response:
        self._count(trail, ending)
        return send_answer(answer, _headers_of(trail))

    async def _deliver(self, request: web.Request, delivery: Delivery, trail: list[Dispatch]) -> web.StreamResponse:
        ending = Ending.CLIENT_LEFT
        try:
            response, ending = await send_stream(request, delivery.stream, delivery.chunks(), _headers_of(trail))
            return response
        finally:
            self._count(trail, ending)
            await asyncio.shield(delivery.aclose())

    def _count(self, trail: list[Dispatch], ending: Ending) -> None:
        path = _path_of(trail)
        self.metrics_.requests.labels(path or "none", ending).inc()
        if path is Path.LOCAL:
            reason = local_reason(self.config.connector, trail[-1].asked)
            self.metrics_.local.labels(reason or "none").inc()
        if len(trail) > 1:
            self.metrics_.retries.inc()

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Any other route: a decode engine answers it alone."""
        engine = self.fleet.choose(EngineRole.DECODE, "")
        headers = {PATH_HEADER: Path.LOCAL}
        if engine is None:
            problems = "; ".join(self.fleet.problems())
            return send_answer(error_answer(503, f"No decode engine: {problems}", "service_unavailable"), headers)
        try:
            body = relay_body(await read_body(request)) if request.can_read_body else None
            stream = await self.upstream.relay(engine, request.method, request.path_qs, body, self._headers(request))
        except RequestRefused as refused:
            return send_answer(refused.answer, headers)
        except LegFailed as failure:
            return send_answer(failure.answer, headers)
        self.metrics_.relayed.inc()
        ticket = engine.admit(0)
        try:
            response, _ = await send_stream(request, stream, stream.chunks(), headers)
            return response
        finally:
            stream.close()
            ticket.release()

    def _headers(self, request: web.Request) -> dict[str, str]:
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        headers["Content-Type"] = request.headers.get("Content-Type", "application/json")
        if self.config.engine_api_key:
            headers["Authorization"] = f"Bearer {self.config.engine_api_key}"
        elif "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        return headers


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises `RequestRefused` (413) when it is longer than the configured limit."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        answer = error_answer(413, f"The body is too large: {error.text}", "invalid_request_error")
        raise RequestRefused(answer) from None


def _path_of(trail: list[Dispatch]) -> Path | None:
    if not trail:
        return None
    return Path.LOCAL if trail[-1].prefill is None else Path.PD


def _headers_of(trail: list[Dispatch]) -> Mapping[str, str]:
    if not trail:
        return {}
    path = _path_of(trail)
    assert path is not None
    return {PATH_HEADER: path, TRANSFER_HEADER: trail[-1].key.transfer_id}
