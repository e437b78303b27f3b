"""What the routes do. One instance serves one process; owned by the event loop's thread."""

import asyncio
from functools import partial
from pathlib import Path as FilePath

import msgspec
from aiohttp import web

from kvpush.router.admin import Admin
from kvpush.router.answers import LegFailed, RequestRefused, error_answer
from kvpush.router.asked import OTHER, Asked, parse_asked
from kvpush.router.body import Route
from kvpush.router.config import Connector, EngineRole, RouterConfig, SelfCheckMode
from kvpush.router.dispatch import Path
from kvpush.router.dispatcher import Dispatcher
from kvpush.router.enginefile import EngineFileWatch
from kvpush.router.first_token import Fate
from kvpush.router.fleet import Fleet
from kvpush.router.journey import Ending, Journey
from kvpush.router.metrics import Metrics
from kvpush.router.others import NoAnswer, Others, Question
from kvpush.router.pair import Delivery, Legs
from kvpush.router.relay import Relay, relay_body, send_answer
from kvpush.router.requestlog import log_request
from kvpush.router.selfcheck import SelfCheck
from kvpush.router.tally import Tally, joined
from kvpush.router.timeline import Timeline
from kvpush.router.upstream import Upstream

PATH_HEADER = "x-kvpush-path"
TRANSFER_HEADER = "x-kvpush-transfer-id"
FIRST_TOKEN_HEADER = "x-kvpush-first-token"
ID_HEADER = "x-request-id"
_PASSED_ON = ("traceparent", "tracestate", "accept-language")


class Service:
    """Make it inside the running loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.upstream = Upstream(config)
        self.fleet = Fleet(config, self.upstream)
        self.legs = Legs(self.upstream)
        self.dispatcher = Dispatcher(config, self.fleet, self.legs)
        self.others = Others(config.place)
        self.admin = Admin(self.fleet, config, self.others)
        self._self_check = SelfCheck(config, self.fleet, self.legs, self.upstream)
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics = Metrics(self.fleet.engines, lambda: self.dispatcher.admission.waiting)
        self.others.answers(Question.TALLY, self._asked_for_tally)
        self.others.answers(Question.PROBLEMS, self._asked_for_problems)

    async def start(self) -> None:
        """Begin to watch the engines. Raises `ConfigError` when the engines file cannot be read."""
        self.fleet.start()
        if self.config.engines_file:
            watch = EngineFileWatch(FilePath(self.config.engines_file), self.fleet, self.config.poll_s)
            watch.look()
            self._tasks.append(asyncio.create_task(watch.run()))
        if self._checks_itself():
            self._tasks.append(asyncio.create_task(self._self_check.run()))
        await self.others.start()

    def _checks_itself(self) -> bool:
        """Of several workers one does, so that none takes what another's request has moved for its own."""
        is_wanted = self.config.self_check is SelfCheckMode.ON and self.config.connector is not Connector.NONE
        return is_wanted and self.config.place.is_first

    async def aclose(self) -> None:
        """End what is in flight, stop watching, close every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.others.aclose()
        await self.legs.aclose()
        await self.fleet.aclose()
        self.dispatcher.siblings.close()
        self.upstream.close()

    async def health(self, request: web.Request) -> web.Response:
        """200 when a request could be served now, whichever worker gets it; else 503 and the reasons."""
        found = self._problems()
        for answer in await self.others.ask_each(Question.PROBLEMS, list[str]):
            found += [answer.problem] if isinstance(answer, NoAnswer) else answer
        problems = list(dict.fromkeys(found))
        body = msgspec.json.encode({"ready": not problems, "problems": problems})
        return web.Response(status=503 if problems else 200, body=body, content_type="application/json")

    def _problems(self) -> list[str]:
        """Those of this process."""
        problems = self.fleet.problems()
        return self._self_check.problems() if not problems and self._checks_itself() else problems

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text, for all workers."""
        try:
            tallies = [self._metrics.tally(), *await self.others.ask_all(Question.TALLY, Tally)]
        except NoAnswer as error:
            return send_answer(error.answer, {})
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.page(joined(tallies)), headers=headers)

    async def _asked_for_tally(self, body: bytes) -> Tally:
        return self._metrics.tally()

    async def _asked_for_problems(self, body: bytes) -> list[str]:
        return self._problems()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Completions and chat completions."""
        timeline = Timeline()
        asking = request.headers
        client_id, tenant = asking.get(ID_HEADER, ""), asking.get("Authorization", "")
        journey = Journey(OTHER, self._headers(request), timeline, client_id, tenant)
        try:
            journey.asked = await self._read(request)
            timeline.mark("read")
            return await self._deliver(request, await self.dispatcher.open(journey), journey)
        except (RequestRefused, LegFailed) as error:
            journey.ending = Ending.REFUSED
            return send_answer(error.answer, _headers_of(journey))
        finally:
            self._end(journey)

    async def _read(self, request: web.Request) -> Asked:
        body = await self._body(request)
        return parse_asked(Route(request.path), body, self.config.bytes_per_token)

    async def _deliver(self, request: web.Request, delivery: Delivery, journey: Journey) -> web.StreamResponse:
        seconds = journey.timeline.seconds_to("first_byte")
        self._metrics.first_byte(delivery.dispatch.path, seconds or 0.0)
        relay = Relay(request, delivery.stream, _headers_of(journey), partial(self.dispatcher.answered, journey))
        try:
            await relay.run(self.config.idle_timeout_s, self.config.client_stall_timeout_s)
            return relay.response
        finally:
            journey.ending = relay.ending
            if relay.failure is not None:
                delivery.failed(relay.failure)
            if relay.ending is Ending.COMPLETE:
                delivery.finish()
            delivery.close()

    def _end(self, journey: Journey) -> None:
        journey.timeline.mark("end")
        path = journey.trail[-1].path if journey.trail else None
        local = self.dispatcher.local_reason(journey.asked) if path is Path.LOCAL else None
        self._metrics.count(path, journey.ending, len(journey.trail), local)
        self._metrics.conversation(journey)
        self._metrics.first_token(journey)
        log_request(journey)

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Any other route: a decode engine answers it alone."""
        self._metrics.relayed()
        try:
            body = relay_body(await self._body(request)) if request.can_read_body else None
            return await self._relay(request, body)
        except (RequestRefused, LegFailed) as error:
            return send_answer(error.answer, {PATH_HEADER: Path.LOCAL})

    async def _relay(self, request: web.Request, body: bytes | None) -> web.StreamResponse:
        usable = self.fleet.usable(EngineRole.DECODE)
        if not usable:
            problems = "; ".join(self.fleet.problems())
            raise RequestRefused(error_answer(503, f"No decode engine: {problems}", "service_unavailable"))
        engine = min(usable, key=lambda engine: engine.requests)
        seat = engine.admit(OTHER)
        try:
            stream = await self.upstream.relay(engine, request.method, request.path_qs, body, self._headers(request))
            try:
                relay = Relay(request, stream, {PATH_HEADER: Path.LOCAL})
                await relay.run(self.config.idle_timeout_s, self.config.client_stall_timeout_s)
                return relay.response
            finally:
                stream.close()
        finally:
            seat.release()

    async def _body(self, request: web.Request) -> bytes:
        """The whole body. Raises `RequestRefused` when it is too long or too slow."""
        try:
            if request.content.is_eof():  # it came with the head: most do, and need no timer
                return await request.read()
            async with asyncio.timeout(self.config.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            answer = error_answer(413, f"The body is over {self.config.max_body_bytes} bytes.", "invalid_request_error")
        except TimeoutError:
            answer = error_answer(408, "The body took too long to arrive.", "invalid_request_error")
        raise RequestRefused(answer)

    def _headers(self, request: web.Request) -> dict[str, str]:
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        headers["Content-Type"] = request.headers.get("Content-Type", "application/json")
        if self.config.engine_api_key:
            headers["Authorization"] = f"Bearer {self.config.engine_api_key}"
        elif "Authorization" in request.headers and not self.config.api_keys:
            headers["Authorization"] = request.headers["Authorization"]
        return headers


def _headers_of(journey: Journey) -> dict[str, str]:
    headers = {ID_HEADER: journey.client_id} if journey.client_id else {}
    if journey.trail:
        headers[PATH_HEADER] = journey.trail[-1].path
        headers[TRANSFER_HEADER] = journey.trail[-1].key.transfer_id
        if journey.trail[-1].first_token is Fate.UNCONFIRMED:
            headers[FIRST_TOKEN_HEADER] = EngineRole.PREFILL
    return headers
