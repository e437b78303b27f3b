"""A closed loop of streaming requests on raw connections, cheap enough to measure a router beside it."""

import asyncio
import time
from urllib.parse import urlsplit

import msgspec

_BODY = b'{"model":"m","prompt":"%b","max_tokens":32,"stream":true}'
_END = b"0\r\n\r\n"
_EVENT = b"data: {"


class StreamTiming(msgspec.Struct, kw_only=True):
    """One answer: seconds from sending to its first event and to its end; events and the time each arrived."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    events: int = 0
    arrivals_s: list[float] = []
    ok: bool = False


class _Client(asyncio.Protocol):
    """One keep-alive connection that asks after `delay_s`, and again as soon as it has been answered."""

    def __init__(self, request: bytes, budget: "Budget", delay_s: float) -> None:
        self._request = request
        self._budget = budget
        self._delay_s = delay_s
        self._timing = StreamTiming()
        self._sent = 0.0
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        asyncio.get_running_loop().call_later(self._delay_s, self._ask)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._budget.failed(f"a connection was lost: {exc or 'closed by the router'}")

    def _ask(self) -> None:
        if self._transport is None:
            return  # it was lost before it could ask
        if not self._budget.take():
            transport, self._transport = self._transport, None
            transport.close()
            self._budget.client_done()
            return
        self._timing, self._tail = StreamTiming(arrivals_s=[]), b""
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        timing = self._timing
        if not self._tail:
            timing.ok = data.startswith(b"HTTP/1.1 200")
        found = data.count(_EVENT)
        if found and not timing.events:
            timing.ttft_s = now - self._sent
        timing.events += found
        timing.arrivals_s.extend([now - self._sent] * found)
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END or (not timing.ok and _is_whole(data)):
            timing.total_s = now - self._sent
            self._budget.finished(timing)
            self._ask()


def _is_whole(data: bytes) -> bool:
    return b"\r\n\r\n" in data and not data.endswith(b"\r\n\r\n")


class Budget:
    """How many requests are still to be sent, and what came of those that were."""

    def __init__(self, requests: int, clients: int) -> None:
        self._left = requests
        self._clients = clients
        self.timings: list[StreamTiming] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self) -> bool:
        """One more request may be sent."""
        self._left -= 1
        return self._left >= 0

    def finished(self, timing: StreamTiming) -> None:
        """One request has been answered."""
        self.timings.append(timing)

    def client_done(self) -> None:
        """One client has nothing left to send."""
        self._clients -= 1
        if not self._clients and not self.done.done():
            self.done.set_result(None)

    def failed(self, problem: str) -> None:
        """The load cannot go on."""
        if not self.done.done():
            self.done.set_exception(ConnectionError(problem))


async def closed_loop(
    url: str, requests: int, concurrency: int, prompt_bytes: int = 400, spread_s: float = 0.0
) -> tuple[list[StreamTiming], float]:
    """Send so many requests, so many at a time; the answers, and the seconds it took. The first ones are sent over
    `spread_s`: answers that take as long each would otherwise all begin and end together, for ever.

    Raises `ConnectionError` when a connection breaks, `TimeoutError` when it takes more than five minutes.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    body = _BODY % (b"word " * (prompt_bytes // 5))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    clients = min(concurrency, requests)
    budget = Budget(requests, clients)
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    for number in range(clients):
        client = _Client(head % len(body) + body, budget, spread_s * number / clients)
        await loop.create_connection(lambda made=client: made, parts.hostname, parts.port)  # type: ignore[misc]
    async with asyncio.timeout(300.0):
        await budget.done
    return budget.timings, time.perf_counter() - started
