"""Both legs of one dispatch, one fate.

Where the connector allows it both legs are sent at once. Until the first byte of the answer has come, the first
leg that fails ends the other; after that, closing the answer does. A leg is ended by closing its connection,
which is how an engine learns that nobody wants the answer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import msgspec

from kvpush.core.ids import Key
from kvpush.router.answers import Cause, LegFailed, broken_leg
from kvpush.router.asked import Asked
from kvpush.router.body import encode, with_params
from kvpush.router.config import Connector
from kvpush.router.connectors import decode_params, is_concurrent, prefill_params, read_prefill_answer
from kvpush.router.engine import Engine, Identity, Ticket
from kvpush.router.prefill_body import prefill_fields
from kvpush.router.timeline import Timeline
from kvpush.router.upstream import Stream, Upstream

CAUSE_GRACE_S = 0.05
"""How long a decode leg's failure waits for the prefill leg's, which is then likely its cause."""

LINGER_S = 0.25
"""How long a prefill leg may outlive a complete answer; its own answer is normally on its way by then."""


@dataclass(frozen=True)
class Dispatch:
    """One try to serve a request: fresh key, chosen engines."""

    asked: Asked
    key: Key
    connector: Connector
    decode: Engine
    prefill: Engine | None
    identity: Identity | None
    headers: Mapping[str, str]
    timeline: Timeline = field(default_factory=Timeline)


class Delivery:
    """An answer that has begun. `chunks()` once, then `aclose()` whatever happened."""

    def __init__(self, dispatch: Dispatch, stream: Stream, prefill: "asyncio.Task[object] | None", ticket: Ticket):
        self.dispatch = dispatch
        self.stream = stream
        self._prefill = prefill
        self._ticket = ticket
        self._complete = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """The decode leg's body. Raises `LegFailed` when it breaks off."""
        async for chunk in self.stream.chunks():
            yield chunk
        self._complete = True

    async def aclose(self) -> None:
        """End what is left of both legs."""
        self.stream.close()
        self._ticket.release()
        if self._prefill is None:
            return
        if self._complete and not self._prefill.done():
            await asyncio.wait((self._prefill,), timeout=LINGER_S)
        await end_task(self._prefill)


async def end_task(task: "asyncio.Task[object]") -> None:
    """Cancel a task and take its outcome, so that nothing is left unobserved."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LegFailed):
        await task


async def open_local(upstream: Upstream, dispatch: Dispatch) -> Delivery:
    """The decode engine computes the prompt itself. Raises `LegFailed`."""
    ticket = dispatch.decode.admit(dispatch.asked.tokens)
    try:
        return Delivery(dispatch, await _decode(upstream, dispatch, encode(dispatch.asked.fields)), None, ticket)
    except BaseException:
        ticket.release()
        raise


async def open_pair(upstream: Upstream, dispatch: Dispatch) -> Delivery:
    """Start both legs and wait for the first byte of the answer. Raises `LegFailed` of the leg at fault."""
    ticket = dispatch.decode.admit(dispatch.asked.tokens)
    prefill = asyncio.create_task(_prefill(upstream, dispatch))
    decode: asyncio.Task[Stream] | None = None
    try:
        if not is_concurrent(dispatch.connector):
            params = await prefill
            return Delivery(dispatch, await _decode(upstream, dispatch, _pull_body(dispatch, params)), None, ticket)
        decode = asyncio.create_task(_decode(upstream, dispatch, _push_body(dispatch)))
        return Delivery(dispatch, await _first_byte(prefill, decode), prefill, ticket)
    except BaseException:
        ticket.release()
        await _end_legs(prefill, decode)
        raise


async def _end_legs(prefill: "asyncio.Task[msgspec.Raw | None]", decode: "asyncio.Task[Stream] | None") -> None:
    await end_task(prefill)
    if decode is None:
        return
    if decode.done() and not decode.cancelled() and decode.exception() is None:
        decode.result().close()
    await end_task(decode)


async def _first_byte(prefill: "asyncio.Task[msgspec.Raw | None]", decode: "asyncio.Task[Stream]") -> Stream:
    done, _ = await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
    if decode not in done:
        prefill.result()
        await asyncio.wait((decode,))
    failure = decode.exception()
    if failure is None:
        return decode.result()
    if isinstance(failure, LegFailed) and failure.engines_fault and not prefill.done():
        await asyncio.wait((prefill,), timeout=CAUSE_GRACE_S)
    if prefill.done():
        prefill.result()
    raise failure


async def _decode(upstream: Upstream, dispatch: Dispatch, body: bytes) -> Stream:
    dispatch.timeline.mark("decode_sent")
    stream = await upstream.stream(dispatch.decode, dispatch.asked.route, body, dispatch.headers)
    dispatch.timeline.mark("first_byte")
    return stream


async def _prefill(upstream: Upstream, dispatch: Dispatch) -> msgspec.Raw | None:
    engine = dispatch.prefill
    assert engine is not None
    fields = prefill_fields(dispatch.asked.route, dispatch.asked.fields)
    body = with_params(fields, prefill_params(dispatch.connector, dispatch.key))
    ticket = engine.admit(dispatch.asked.tokens)
    try:
        dispatch.timeline.mark("prefill_sent")
        answer = await upstream.whole(engine, dispatch.asked.route, body, dispatch.headers)
        dispatch.timeline.mark("prefill_done")
        return read_prefill_answer(answer.body)
    except msgspec.DecodeError as error:
        raise broken_leg(engine.role, engine.url, Cause.BROKEN, f"its answer is not JSON: {error}") from None
    finally:
        ticket.release()


def _push_body(dispatch: Dispatch) -> bytes:
    assert dispatch.identity is not None
    return with_params(dispatch.asked.fields, decode_params(dispatch.connector, dispatch.key, dispatch.identity))


def _pull_body(dispatch: Dispatch, params: msgspec.Raw | None) -> bytes:
    if params is None:
        assert dispatch.prefill is not None
        raise broken_leg(
            dispatch.prefill.role,
            dispatch.prefill.url,
            Cause.BROKEN,
            "its answer has no kv_transfer_params; is a KV connector configured on it?",
        )
    return with_params(dispatch.asked.fields, params)
