"""The HTTP server: routes, answers, and the life of the process."""

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvpush.router.admin import has_key
from kvpush.router.answers import error_answer
from kvpush.router.config import RouterConfig
from kvpush.router.listener import listening
from kvpush.router.relay import send_answer
from kvpush.router.service import Service

logger = logging.getLogger(__name__)

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def make_app(config: RouterConfig) -> web.Application:
    """The router as an aiohttp application. Run it with handler cancellation on, or clients that leave are
    noticed late."""
    app = web.Application(
        client_max_size=config.max_body_bytes, middlewares=[_key_check(config)] if config.api_keys else []
    )
    app.cleanup_ctx.append(_service_context(config))
    app.router.add_get("/health", _handler(Service.health))
    app.router.add_get("/metrics", _handler(Service.metrics))
    app.router.add_get("/admin/engines", _handler(lambda service, request: service.admin.list(request)))
    app.router.add_post("/admin/engines", _handler(lambda service, request: service.admin.add(request)))
    app.router.add_delete("/admin/engines", _handler(lambda service, request: service.admin.remove(request)))
    app.router.add_post("/drain", _handler(lambda service, request: service.admin.drain(request)))
    app.router.add_post("/v1/completions", _handler(Service.generate))
    app.router.add_post("/v1/chat/completions", _handler(Service.generate))
    app.router.add_route("*", "/{path:.*}", _handler(Service.relay))
    return app


def _service_context(config: RouterConfig) -> Callable[[web.Application], AsyncIterator[None]]:
    async def context(app: web.Application) -> AsyncIterator[None]:
        service = Service(config)
        app[SERVICE] = service
        try:
            await service.start()
            yield
        finally:
            await service.aclose()

    return context


def _handler(
    method: Callable[[Service, web.Request], Awaitable[web.StreamResponse]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await method(request.app[SERVICE], request)

    return handle


_OPEN_ROUTES = ("/health", "/metrics")
_ADMIN_ROUTES = ("/admin/", "/drain")


def _key_check(config: RouterConfig) -> Middleware:
    """Refuse clients without a key; probes, and the admin routes with a key of their own, excepted."""
    keys = tuple(config.api_keys)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_free = request.path in _OPEN_ROUTES or request.path.startswith(_ADMIN_ROUTES)
        if is_free or has_key(request, keys):
            return await handler(request)
        message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
        return send_answer(error_answer(401, message, "authentication_error"), {})

    return check


@asynccontextmanager
async def running(config: RouterConfig) -> AsyncIterator[str]:
    """Serve inside this block; yields the base URL, with the real port where `config.port` is 0.

    Raises `ConfigError` when the address cannot be listened on.
    """
    runner = web.AppRunner(
        make_app(config),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=config.drain_timeout_s,
        max_line_size=config.max_header_bytes,
        max_field_size=config.max_header_bytes,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        async with listening(config, runner.server) as url:
            yield url
    finally:
        await runner.cleanup()


async def serve(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM, then let answers in progress end for a few seconds."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as url:
        logger.info("kvpush router listens on %s, connector %s", url, config.connector)
        await stop.wait()


def run(config: RouterConfig) -> None:
    """`serve` on a uvloop loop of its own."""
    gc.freeze()  # what was imported stays: collections need not look at it again and again
    uvloop.run(serve(config))
