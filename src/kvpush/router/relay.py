"""Bytes from an engine to a client: no chunk is parsed, and none is sent in part.

Server-sent events are passed on up to the last whole event, so that an answer which breaks off can still end with
an error event a client understands. A client that reads slowly stops the reading from the engine: `write`
waits, and no more than the two sockets' buffers is held.
"""

from collections.abc import Callable, Mapping
from json import detect_encoding

import msgspec
from aiohttp import web

from kvpush.router.ahead import Ahead
from kvpush.router.answers import Answer, Cause, LegFailed, RequestRefused, broken_leg, error_answer
from kvpush.router.body import OWNED, encode, parse_fields, strip_owned
from kvpush.router.events import EVENT_END
from kvpush.router.idle import IdleTimeout
from kvpush.router.journey import Ending
from kvpush.router.upstream import Stream

_MAX_HELD_BYTES = 1024 * 1024
_MAX_UNDRAINED_BYTES = 64 * 1024


def relay_body(body: bytes) -> bytes:
    """A body for a route the router does not know, without what a client may not set.

    Raises `RequestRefused` (400) for JSON in another encoding than UTF-8, which engines would understand.
    """
    if detect_encoding(body[:4]) != "utf-8":
        raise RequestRefused(error_answer(400, "Send JSON as UTF-8 without a BOM.", "invalid_request_error"))
    if OWNED.encode() not in body and b"\\u" not in body:
        return body
    if not body.lstrip().startswith(b"{"):
        return body
    return encode(strip_owned(parse_fields(body)))


def send_answer(answer: Answer, headers: Mapping[str, str]) -> web.Response:
    """A whole answer."""
    return web.Response(
        status=answer.status, body=answer.body, headers={**headers, "Content-Type": answer.content_type}
    )


def _nothing() -> None:
    pass


class _Response(web.StreamResponse):
    # the head then leaves together with the first chunk, in one system call
    _send_headers_immediately = False


class Relay:
    """One answer on its way to a client. `run()` it once; then `ending` says how it went, and `failure` why."""

    def __init__(
        self,
        request: web.Request,
        stream: Stream | Ahead,
        headers: Mapping[str, str],
        on_whole: Callable[[], None] = _nothing,
    ) -> None:
        """`on_whole` is called once, when the engine's answer is complete, before the client has its end."""
        self._on_whole = on_whole
        self.ending = Ending.CLIENT_LEFT
        self.failure: LegFailed | None = None
        self._request = request
        self._stream = stream
        self._is_waiting_for_engine = False
        self.response: web.StreamResponse = _Response(
            status=stream.status, headers={**headers, "Content-Type": stream.content_type}
        )
        if stream.content_length is not None:
            self.response.content_length = int(stream.content_length)

    async def run(self, idle_timeout_s: float, stall_timeout_s: float) -> None:
        """Relay to the end. The engine may pause for `idle_timeout_s`, the client for `stall_timeout_s`."""
        try:
            with IdleTimeout(min(idle_timeout_s, stall_timeout_s)) as patience:
                patience.allow(stall_timeout_s)
                await self._relay(patience, idle_timeout_s, stall_timeout_s)
            self.ending = Ending.COMPLETE
        except TimeoutError:
            await self._timed_out()
        except LegFailed as failure:
            await self._break_off(failure)
        except ConnectionError:
            self.ending = Ending.CLIENT_LEFT
        finally:
            if self.ending is Ending.CLIENT_LEFT and self._stream.said_done:
                self.ending = Ending.COMPLETE

    def _note_whole(self) -> None:
        on_whole, self._on_whole = self._on_whole, _nothing
        on_whole()

    async def _relay(self, patience: IdleTimeout, idle_timeout_s: float, stall_timeout_s: float) -> None:
        await self.response.prepare(self._request)
        held = b""
        is_events = self._stream.is_events
        chunk = self._stream.first
        while not self._stream.is_complete:
            if self._stream.said_done:
                self._note_whole()
            if is_events and (held or not chunk.endswith(EVENT_END)):
                whole, held = cut_after_event(held + chunk)
                if whole:
                    await self.response.write(whole)
            else:
                await self.response.write(chunk)
            patience.allow(idle_timeout_s)
            self._is_waiting_for_engine = True
            chunk = await self._stream.next_chunk()
            self._is_waiting_for_engine = False
            patience.allow(stall_timeout_s)
        self._note_whole()
        last = held + chunk
        if len(last) > _MAX_UNDRAINED_BYTES:
            await self.response.write(last)
            last = b""
        await self.response.write_eof(last)  # with the answer's end in one system call

    async def _timed_out(self) -> None:
        if self._is_waiting_for_engine:
            engine = self._stream.engine
            await self._break_off(broken_leg(engine.role, engine.url, Cause.TIMEOUT, "its answer does not go on"))
            return
        self.ending = Ending.CLIENT_STALLED
        self.response.force_close()
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _break_off(self, failure: LegFailed) -> None:
        """Tell the client, and let it see that the answer has no clean end."""
        self.ending, self.failure = Ending.BROKEN_OFF, failure
        self.response.force_close()
        try:
            if self._stream.is_events:
                await self.response.write(b"data: " + msgspec.json.format(failure.answer.body, indent=-1) + EVENT_END)
        except ConnectionError:
            return
        if self._request.transport is not None:
            self._request.transport.close()


def cut_after_event(data: bytes) -> tuple[bytes, bytes]:
    """What may be sent, and what must be held until its event is whole; an absurdly long event is sent in parts."""
    cut = data.rfind(EVENT_END)
    if cut < 0:
        return (data, b"") if len(data) > _MAX_HELD_BYTES else (b"", data)
    cut += len(EVENT_END)
    return data[:cut], data[cut:]
