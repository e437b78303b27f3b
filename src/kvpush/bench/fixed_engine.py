"""An engine with a fixed service time and no model: the other end of a router's benchmark.

Written on asyncio's protocols, without an HTTP library, so that it costs little of the machine that is measured. It
speaks just enough HTTP/1.1 for a router: keep-alive, Content-Length bodies in, chunked streams out.
"""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec

_BACKLOG = 2048  # as uvicorn has it; with too few, a burst of connections is delayed by TCP's repeats
_HEAD_END = b"\r\n\r\n"
_METRICS = (
    b'kvpush_engine_info{engine_id="fixed",host="127.0.0.1",port="1",tp_size="1"} 1.0\n'
    b'vllm:num_requests_running{engine="0"} 0.0\n'
)
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
_ANSWER = (
    b'{"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a","finish_reason":'
    b'"length"}],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}}'
)
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":" token","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """`service_s` until the first byte of an answer; then `chunks` events, `gap_s` apart."""

    service_s: float = 0.010
    chunks: int = 32
    gap_s: float = 0.0


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_STREAM_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_STREAM_EVENT = _chunk(_EVENT)


class _Connection(asyncio.Protocol):
    """One client; requests are answered one after the other."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            return
        head = self._buffer[:end]
        length = _content_length(head)
        start = end + len(_HEAD_END)
        if len(self._buffer) < start + length:
            return
        body, self._buffer = self._buffer[start : start + length], self._buffer[start + length :]
        self._serve(head, body)

    def _serve(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /metrics"):
            self._write(_plain(_METRICS))
        elif head.startswith(b"GET "):
            self._write(_plain(_MODELS))
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._timer = self._loop.call_later(self._timing.service_s, self._first)
        else:
            self._timer = self._loop.call_later(self._timing.service_s, self._write, _plain(_ANSWER))

    def _first(self) -> None:
        self._write(_STREAM_HEAD)
        self._next(self._timing.chunks)

    def _next(self, left: int) -> None:
        if self._timing.gap_s == 0.0:
            for _ in range(left):
                self._write(_STREAM_EVENT)
            left = 0
        elif left:
            self._write(_STREAM_EVENT)
            self._timer = self._loop.call_later(self._timing.gap_s, self._next, left - 1)
            return
        self._write(_STREAM_END)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _content_length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at < 0:
        return 0
    return int(lower[at + len(b"content-length:") :].split(b"\r\n", 1)[0])


async def _serve_forever(timing: Timing, engines: int, ports: Connection) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: _Connection(timing), "127.0.0.1", 0, backlog=_BACKLOG) for _ in range(engines)
    ]
    ports.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.gather(*(server.serve_forever() for server in servers))


def _run(timing: Timing, engines: int, ports: Connection) -> None:
    import uvloop

    uvloop.run(_serve_forever(timing, engines, ports))


@contextmanager
def fixed_engines(timing: Timing, engines: int) -> Iterator[list[str]]:
    """So many engines in one child process; yields their base URLs."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(timing, engines, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(60.0):
            raise TimeoutError("the engines of the router benchmark did not start within 60 s")
        yield [f"http://127.0.0.1:{port}" for port in ours.recv()]
    finally:
        process.terminate()
        process.join()
