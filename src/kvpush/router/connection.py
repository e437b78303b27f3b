"""One HTTP/1.1 connection to an engine: one request at a time, and its answer as it comes in.

The parser is httptools (llhttp); this is the little around it that a router needs, because a whole client library
costs as much per request as all else here: it makes an object of each header and each chunk, and keeps a timer for
each read. Here what has come is handed over in one piece, and there is one timer per answer.

Owned by the event loop's thread.
"""

import asyncio
from typing import Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_MAX_HEAD_BYTES = 64 * 1024
_MAX_BUFFERED_BYTES = 256 * 1024
_NO_BODY = frozenset({204, 304})
_PATH = b"x-kvpush-path"


class BadAnswer(ConnectionError):
    """What came is no HTTP, or broke off."""


class Incoming:
    """One answer. The parser calls the `on_` methods; `status` is 0 until the head is here."""

    def __init__(self, method: str) -> None:
        self.status = 0
        self.content_type = ""
        self.content_length: str | None = None
        self.path = ""  # what the engine says of it, as kvpush's decode engines may
        self.is_complete = False
        self.leaves_connection_open = False
        self.buffered_bytes = 0
        self._has_body = method != "HEAD"
        self._is_delimited = False
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._parser = HttpResponseParser(self)

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or nothing will ever be."""
        return self.is_complete or self.buffered_bytes > 0

    def feed(self, data: bytes) -> None:
        """Take what the connection has brought. Raises `BadAnswer`."""
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise BadAnswer(f"its answer is no HTTP: {error}") from None
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                raise BadAnswer(f"the head of its answer is longer than {_MAX_HEAD_BYTES} bytes")

    def feed_end(self) -> None:
        """The connection has ended well, which is how some answers end. Raises `BadAnswer` when this one does not."""
        if not self.is_complete and (not self.status or self._is_delimited):
            raise BadAnswer("it closed the connection before its answer was complete")
        self.is_complete, self.leaves_connection_open = True, False

    def take(self) -> bytes:
        """All of the body that has come and was not taken."""
        parts, self._parts, self.buffered_bytes = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def on_message_begin(self) -> None:
        """Something comes after the answer that nobody has asked for."""
        if self.is_complete:
            self.leaves_connection_open = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer."""
        if self.status:
            return
        known = name.lower()
        if known == b"content-type":
            self.content_type = value.decode("latin-1")
        elif known == b"content-length":
            self.content_length, self._is_delimited = value.decode("latin-1"), True
        elif known == b"transfer-encoding":
            self._is_delimited = True
        elif known == _PATH:
            self.path = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is here; that of a 1xx is not the answer's."""
        status = self._parser.get_status_code()
        if status < 200 or self.is_complete:
            return
        self.status = status
        self.leaves_connection_open = self._has_body and self._parser.should_keep_alive()
        self._is_delimited = self._is_delimited or status in _NO_BODY
        self.is_complete = not self._has_body

    def on_body(self, body: bytes) -> None:
        """More of the body."""
        if not self.is_complete:
            self._parts.append(body)
            self.buffered_bytes += len(body)

    def on_message_complete(self) -> None:
        """The answer's end, or that of a 1xx."""
        self.is_complete = self.status > 0


class Owner(Protocol):
    """Where a connection comes from and goes back to."""

    def put_back(self, connection: "Connection") -> None:
        """It can be asked again."""

    def forget(self, connection: "Connection") -> None:
        """It has ended."""


class Connection(asyncio.Protocol):
    """`ask` it, `read` until b"", `release` it in any case."""

    def __init__(self, owner: Owner) -> None:
        self.answer = Incoming("")
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._is_asked = False
        self._is_paused = False
        self._error: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._silence_s = 0.0
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = transport  # type: ignore[assignment]

    def ask(self, method: str, request: bytes, silence_s: float) -> None:
        """Send a request, head and body. Nothing for `silence_s` seconds while somebody reads is an error."""
        self.answer, self._is_asked, self._silence_s = Incoming(method), True, silence_s
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(silence_s, self._look)
        if self._transport is not None:
            self._transport.write(request)

    async def read(self) -> bytes:
        """What of the body has come, b"" at its end; the answer's head is here as soon as this returns.

        Raises `BadAnswer` when it breaks off, `TimeoutError` when nothing comes for too long.
        """
        while not self.answer.has_news:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data = self.answer.take()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        """Be done with the answer: an engine that has not finished it sees its client leave. Idempotent."""
        if not self._is_asked:
            return
        self._is_asked = False
        if self._timer is not None:
            self._timer.cancel()
        if self.answer.is_complete and self.answer.leaves_connection_open and self._error is None:
            self._owner.put_back(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes have come; when nobody has asked for any, the connection is of no use."""
        if not self._is_asked:
            self.abort()
            return
        self._heard_at = self._loop.time()
        try:
            self.answer.feed(data)
        except BadAnswer as error:
            self._fail(error)
            return
        if self.answer.buffered_bytes > _MAX_BUFFERED_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        if self.answer.has_news:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._transport = None
        self._owner.forget(self)
        try:
            if exc is not None:
                raise BadAnswer(str(exc) or type(exc).__name__)
            self.answer.feed_end()
        except BadAnswer as error:
            self._error = self._error or error
        self._wake()

    def _look(self) -> None:
        """Has it been silent for too long? It cannot be while nobody reads."""
        now = self._loop.time()
        if self._waiter is None:
            self._heard_at = now
        left = self._heard_at + self._silence_s - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._fail(TimeoutError())

    def _fail(self, error: OSError) -> None:
        self._error = self._error or error
        self._wake()
        self.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
