"""An OpenAI-like server whose behaviour is scripted: what a load generator has to cope with."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from kvpush.bench.client import Target


@dataclass
class Script:
    """`texts` are streamed `gap_s` apart after `first_s`; `completion_tokens` is what the usage chunk says."""

    texts: tuple[str, ...] = (" a", " b", " c")
    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    completion_tokens: int = 3
    cut_after: int | None = None
    error_after: int | None = None
    in_flight: int = 0
    most_in_flight: int = 0
    bodies: list[dict[str, object]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)


async def _chunk(response: web.StreamResponse, content: object) -> None:
    await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")


async def _stream(request: web.Request, script: Script) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-kvpush-transfer-id": "f" * 32})
    await response.prepare(request)
    await asyncio.sleep(script.first_s)
    for i, text in enumerate(script.texts):
        if i == script.cut_after:
            assert request.transport is not None
            request.transport.abort()
            return response
        if i == script.error_after:
            await _chunk(response, {"error": {"message": "engine died"}})
            return response
        await _chunk(response, {"choices": [{"text": text}]})
        await asyncio.sleep(script.gap_s)
    await _chunk(response, {"choices": [], "usage": {"completion_tokens": script.completion_tokens}})
    await response.write(b"data: [DONE]\n\n")
    return response


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Target]:
    """Serve `script` on a free port of this host."""

    async def completions(request: web.Request) -> web.StreamResponse:
        script.bodies.append(await request.json())
        script.request_ids.append(request.headers["X-Request-Id"])
        if script.status != 200:
            return web.Response(status=script.status, text="no such model")
        script.in_flight += 1
        script.most_in_flight = max(script.most_in_flight, script.in_flight)
        try:
            return await _stream(request, script)
        finally:
            script.in_flight -= 1

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Target(site.name, "stub", timeout_s=5.0)
    finally:
        await runner.cleanup()
