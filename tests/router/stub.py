"""Engines without a model: real HTTP servers whose every answer is scripted by the test."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web

POLL_S = 0.005


class Cut(StrEnum):
    """Where the stub drops the connection."""

    NEVER = "never"
    BEFORE_HEAD = "before_head"
    AFTER_HEAD = "after_head"
    MID_BODY = "mid_body"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One scripted answer. `chunks` are written one by one, `gap_s` apart, after `wait_s`."""

    status: int = 200
    chunks: tuple[bytes, ...]
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    gap_s: float = 0.0
    cut: Cut = Cut.NEVER
    head_first: bool = False


@dataclass(eq=False)
class Seen:
    """One request the stub has got."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]  # names in lower case
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.body["kv_transfer_params"]
        return params


def json_reply(content: object, **settings: Any) -> Reply:
    return Reply(chunks=(json.dumps(content).encode(),), **settings)


def error_reply(status: int, message: str = "scripted", **settings: Any) -> Reply:
    return json_reply({"error": {"message": message, "code": status}}, status=status, **settings)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def stream_reply(tokens: int = 3, **settings: Any) -> Reply:
    chunks = (*(event(f"t{number}") for number in range(tokens)), b"data: [DONE]\n\n")
    return Reply(chunks=chunks, content_type="text/event-stream; charset=utf-8", head_first=True, **settings)


def good_prefill(seen: Seen) -> Reply:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "p0"}
    return json_reply({"choices": [{"index": 0, "text": "t0"}], "kv_transfer_params": params})


def good_decode(seen: Seen) -> Reply:
    if seen.body.get("stream"):
        return stream_reply()
    return json_reply({"choices": [{"index": 0, "text": "t0t1t2"}], "usage": {"completion_tokens": 3}})


@dataclass(eq=False)
class Stub:
    """A running stub engine; change `script` and the gauges at any time."""

    script: Callable[[Seen], Reply]
    engine_id: str = "p0"
    control_port: int = 7001
    metrics_status: int = 200
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    moved_tokens: int = 0
    moves_tokens: int = 0  # what each leg with a remote prefill adds to them
    written_bytes: int = 0
    polls: int = 0
    url: str = ""
    seen: list[Seen] = field(default_factory=list)

    @property
    def live(self) -> list[Seen]:
        return [seen for seen in self.seen if not seen.ended.is_set()]

    @property
    def aborted(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.aborted]

    def metrics_page(self) -> str:
        label = f'engine_id="{self.engine_id}",host="127.0.0.1",port="{self.control_port}",tp_size="1"'
        return "\n".join(
            (
                f"kvpush_engine_info{{{label}}} 1.0" if self.engine_id else "# no identity",
                f'vllm:num_requests_running{{engine="0",model_name="m"}} {self.running}.0',
                f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {self.waiting}.0',
                f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {self.kv_usage}',
                'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0',
                f'vllm:external_prefix_cache_hits_total{{engine="0",model_name="m"}} {self.moved_tokens}.0',
            )
        )


@asynccontextmanager
async def running_stub(script: Callable[[Seen], Reply], port: int = 0, **gauges: Any) -> AsyncIterator[Stub]:
    """Serve a stub inside this block."""
    stub = Stub(script, **gauges)
    app = web.Application(client_max_size=2**30)

    async def metrics(request: web.Request) -> web.Response:
        stub.polls += 1
        return web.Response(text=stub.metrics_page(), status=stub.metrics_status)

    async def serve(request: web.Request) -> web.StreamResponse:
        return await _serve(stub, request)

    app.router.add_get("/metrics", metrics)
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield stub
    finally:
        await runner.cleanup()


async def _serve(stub: Stub, request: web.Request) -> web.StreamResponse:
    body = await request.read()
    seen = Seen(
        request.path, json.loads(body) if body else {}, {name.lower(): value for name, value in request.headers.items()}
    )
    stub.seen.append(seen)
    if seen.body.get("kv_transfer_params", {}).get("do_remote_prefill"):
        stub.moved_tokens += stub.moves_tokens
    try:
        return await _answer(stub, request, stub.script(seen))
    except (asyncio.CancelledError, ConnectionError):
        seen.aborted = True
        raise
    finally:
        seen.ended.set()


async def _answer(stub: Stub, request: web.Request, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type, **reply.headers})
    if not reply.head_first:
        await asyncio.sleep(reply.wait_s)
    if reply.cut is Cut.BEFORE_HEAD:
        return _drop(request, response)
    await response.prepare(request)
    if reply.head_first:
        await asyncio.sleep(reply.wait_s)
    if reply.cut is Cut.AFTER_HEAD:
        return _drop(request, response)
    for number, chunk in enumerate(reply.chunks):
        if number:
            await asyncio.sleep(reply.gap_s)
        if reply.cut is Cut.MID_BODY and number == len(reply.chunks) - 1:
            await response.write(chunk[: len(chunk) // 2])
            return _drop(request, response)
        await response.write(chunk)
        stub.written_bytes += len(chunk)
    await response.write_eof()
    return response


def _drop(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return response


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for a condition. Raises `TimeoutError` when it does not come true in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - any condition can be waited for
            await asyncio.sleep(POLL_S)
