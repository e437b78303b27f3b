"""Bytes from an engine to a client: no chunk is parsed, and none is sent in part.

Server-sent events are passed on up to the last whole event, so that an answer which breaks off can still end with
an error event a client understands. A client that reads slowly stops the reading from the engine: `write`
waits, and no more than the two sockets' buffers is held.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping

import msgspec
from aiohttp import web

from kvpush.router.answers import Answer, LegFailed
from kvpush.router.body import OWNED, encode, parse_fields, strip_owned
from kvpush.router.journey import Ending
from kvpush.router.upstream import Stream

_EVENT_END = b"\n\n"
_MAX_HELD_BYTES = 1024 * 1024


def relay_body(body: bytes) -> bytes:
    """A body for a route the router does not know, without what a client may not set."""
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


async def send_stream(
    request: web.Request,
    stream: Stream,
    chunks: AsyncIterator[bytes],
    headers: Mapping[str, str],
    stall_timeout_s: float,
) -> tuple[web.StreamResponse, Ending]:
    """Relay an answer that has begun, and say how it ended. A client may stop reading for `stall_timeout_s`."""
    response = web.StreamResponse(status=stream.status, headers={**headers, "Content-Type": stream.content_type})
    if stream.content_length is not None:
        response.content_length = int(stream.content_length)
    try:
        await response.prepare(request)
        async for chunk in whole_events(chunks) if stream.is_events else chunks:
            async with asyncio.timeout(stall_timeout_s):
                await response.write(chunk)
        await response.write_eof()
    except TimeoutError:
        _hang_up(request, response)
        return response, Ending.CLIENT_STALLED
    except LegFailed as failure:
        await _break_off(request, response, stream, failure)
        return response, Ending.BROKEN_OFF
    except ConnectionError:
        return response, Ending.CLIENT_LEFT
    return response, Ending.COMPLETE


async def whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, cut only between events; an unfinished last event comes only with a clean end."""
    held = b""
    async for chunk in chunks:
        if not held and chunk.endswith(_EVENT_END):
            yield chunk
            continue
        held += chunk
        cut = held.rfind(_EVENT_END) + len(_EVENT_END)
        if cut < len(_EVENT_END):
            cut = len(held) if len(held) > _MAX_HELD_BYTES else 0
        if cut:
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _hang_up(request: web.Request, response: web.StreamResponse) -> None:
    """Drop a client that does not read, with what it has not read."""
    response.force_close()
    if request.transport is not None:
        request.transport.abort()


async def _break_off(request: web.Request, response: web.StreamResponse, stream: Stream, failure: LegFailed) -> None:
    """Tell the client, and let it see that the answer has no clean end."""
    response.force_close()
    try:
        if stream.is_events:
            await response.write(b"data: " + _one_line(failure.answer.body) + _EVENT_END)
    except ConnectionError:
        return
    if request.transport is not None:
        request.transport.close()


def _one_line(body: bytes) -> bytes:
    return bytes(msgspec.json.format(body, indent=-1))
