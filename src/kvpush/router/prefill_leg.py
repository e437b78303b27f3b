"""The prefill leg: what is asked of the prefill engine, and what of its answer is of use."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress

import msgspec

from kvpush.router.answers import Cause, LegFailed, broken_leg
from kvpush.router.body import Fields, with_params
from kvpush.router.connectors import prefill_params, read_prefill_answer, tokens_not_computed
from kvpush.router.dispatch import Dispatch
from kvpush.router.engine import Seat
from kvpush.router.first_token import Fate, FirstToken, FirstTokenReader
from kvpush.router.prefill_body import prefill_fields, streamed
from kvpush.router.upstream import Stream, Upstream

_REST_S = 0.25
"""How long the rest of a stream, after its first token, is waited for; it says nothing more."""


class Prefilled(msgspec.Struct, frozen=True):
    """`params` are for decode legs that are sent afterwards; `first_token` is None when it is not to be sent early."""

    params: msgspec.Raw | None = None
    first_token: FirstToken | None = None


Outlive = Callable[[Coroutine[None, None, None]], None]


async def run_prefill(upstream: Upstream, dispatch: Dispatch, outlive: Outlive) -> Prefilled:
    """Send the leg, and wait until the prompt is computed. Raises `LegFailed`.

    `outlive` runs what is left of an answer in the background.
    """
    seat = dispatch.prefill
    assert seat is not None
    seat.engine.breaker.sent(time.monotonic())
    dispatch.timeline.mark("prefill_sent")
    started = time.monotonic()
    try:
        if dispatch.first_token is Fate.UNDECIDED:
            prefilled = await _sampled(upstream, dispatch, seat, outlive)
        else:
            prefilled = await _answered(upstream, dispatch, seat)
    finally:
        seat.release()
    dispatch.timeline.mark("prefill_done")
    dispatch.reused_tokens = tokens_not_computed(dispatch.connector, prefilled.params)
    seat.engine.prefilled(seat.queue_tokens, time.monotonic() - started)
    return prefilled


async def _answered(upstream: Upstream, dispatch: Dispatch, seat: Seat) -> Prefilled:
    asked = dispatch.asked
    body = _body(dispatch, prefill_fields(asked.route, asked.fields))
    answer = await upstream.whole(seat.engine, asked.route, body, dispatch.headers)
    try:
        return Prefilled(params=read_prefill_answer(answer.body))
    except msgspec.DecodeError as error:
        detail = f"its answer is not JSON: {error}"
        raise broken_leg(seat.engine.role, seat.engine.url, Cause.BROKEN, detail) from None


async def _sampled(upstream: Upstream, dispatch: Dispatch, seat: Seat, outlive: Outlive) -> Prefilled:
    """Read a stream as far as its first token."""
    asked = dispatch.asked
    body = _body(dispatch, streamed(prefill_fields(asked.route, asked.fields)))
    stream = await upstream.stream(seat.engine, asked.route, body, dispatch.headers)
    try:
        token = await _read_first_token(stream)
    except BaseException:
        stream.close()
        raise
    outlive(_read_rest(stream))
    return Prefilled(first_token=token)


def _body(dispatch: Dispatch, fields: Fields) -> bytes:
    return with_params(fields, prefill_params(dispatch.connector, dispatch.key, dispatch.reuse))


async def _read_first_token(stream: Stream) -> FirstToken | None:
    reader, chunk, engine = FirstTokenReader(), stream.first, stream.engine
    while not reader.feed(chunk):
        chunk = await stream.next_chunk()
        if not chunk:
            raise broken_leg(engine.role, engine.url, Cause.BROKEN, "its answer ended before its first token")
    return reader.first_token


async def _read_rest(stream: Stream) -> None:
    """An answer that is left before its end counts as aborted with the engine, and its connection is lost."""
    with suppress(LegFailed, TimeoutError):
        async with asyncio.timeout(_REST_S):
            await stream.read_rest()
    stream.close()
