"""Both legs of one dispatch, one fate.

Where the connector allows it both legs are sent at once. Until the first byte of the answer has come, the first
leg that fails ends the other; after that, closing the answer does. A leg is ended by closing its connection,
which is how an engine learns that nobody wants the answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvpush.core.ids import Key
from kvpush.core.params import Reference
from kvpush.router.answers import Cause, LegFailed, broken_leg
from kvpush.router.asked import Asked
from kvpush.router.body import encode, with_params
from kvpush.router.config import Connector, EngineRole
from kvpush.router.connectors import (
    decode_params,
    is_concurrent,
    prefill_params,
    read_prefill_answer,
    tokens_not_computed,
)
from kvpush.router.engine import Seat
from kvpush.router.prefill_body import prefill_fields
from kvpush.router.timeline import Timeline
from kvpush.router.upstream import Stream, Upstream

CAUSE_GRACE_S = 0.05
"""How long a decode leg's failure waits for the prefill leg's, which is then likely its cause."""

LINGER_S = 0.25
"""How long a prefill leg may outlive a complete answer; its own answer is normally on its way by then."""


class Path(StrEnum):
    """Which way an answer came: the `x-kvpush-path` header and a counter's label."""

    PD = "pd"  # prefill engine and decode engine
    LOCAL = "local"  # the decode engine alone, on purpose
    RECOMPUTED = "recomputed"  # the decode engine alone, because prefill failed


TakeSeat = Callable[[], Awaitable[Seat]]


@dataclass(eq=False, kw_only=True)
class Dispatch:
    """One try to serve a request under a key of its own.

    `decode` is set once a decode engine is chosen, for which `hold_decode_s` seconds are waited, or until the
    prefill leg has ended. `reuse` is where an earlier turn is kept, `keep` under which key this one is to be; so many
    tokens as `reused_tokens` were not computed.
    """

    asked: Asked
    key: Key
    connector: Connector
    path: Path
    headers: Mapping[str, str]
    timeline: Timeline
    prefill: Seat | None = None
    decode: Seat | None = None
    hold_decode_s: float = 0.0
    reuse: Reference | None = None
    keep: Key | None = None
    reused_tokens: int = 0
    failures: list[LegFailed] = field(default_factory=list)

    def fail(self, failure: LegFailed) -> None:
        """Note a leg's failure on the dispatch and on the engine at fault."""
        self.failures.append(failure)
        for seat in (self.prefill, self.decode):
            if seat is not None and seat.engine.url == failure.engine:
                seat.engine.leg_failed(failure, time.monotonic())

    def suspect_prefill(self, failure: LegFailed) -> None:
        """The decode leg has failed before its first byte: perhaps because the KV never came."""
        if self.prefill is not None and may_be_prefills_fault(failure):
            self.prefill.engine.breaker.failed(time.monotonic())

    def release(self) -> None:
        """Give back every seat."""
        for seat in (self.prefill, self.decode):
            if seat is not None:
                seat.release()


def may_be_prefills_fault(failure: LegFailed) -> bool:
    """Whether a decode leg's failure may have its cause on the other engine.

    Both are then suspects, and the innocent one is cleared by its next leg with another partner.
    """
    is_decode = failure.role is EngineRole.DECODE
    return is_decode and failure.engines_fault and failure.cause in (Cause.REFUSED, Cause.TIMEOUT)


class Delivery:
    """An answer that has begun: relay `stream`, then `finish()` when it came to its end, in any case `close()`."""

    def __init__(self, legs: "Legs", dispatch: Dispatch, stream: Stream, prefill: "_Prefill | None") -> None:
        self.dispatch = dispatch
        self.stream = stream
        self._legs = legs
        self._prefill = prefill
        self._grace_s = 0.0

    def finish(self) -> None:
        """The answer is complete: the prefill leg's own answer may still come in a moment."""
        self._grace_s = LINGER_S

    def close(self) -> None:
        """End what is left of both legs, without waiting for it."""
        self.stream.close()
        if self.dispatch.decode is not None:
            self.dispatch.decode.release()
        if self._prefill is not None:
            self._legs.end_later(self.dispatch, self._prefill, self._grace_s)


_Prefill = asyncio.Task[msgspec.Raw | None]
_Decode = asyncio.Task[Stream]


class Legs:
    """Sends legs, and outlives them: prefill legs that are no longer needed are ended in the background."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._ending: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Wait for the legs that are being ended."""
        await asyncio.gather(*self._ending)

    async def open_local(self, dispatch: Dispatch) -> Delivery:
        """The decode engine computes the prompt itself. Raises `LegFailed`."""
        assert dispatch.decode is not None
        dispatch.decode.written()
        try:
            return Delivery(self, dispatch, await self._decode(dispatch, encode(dispatch.asked.fields)), None)
        except BaseException as error:
            _give_up(dispatch, error)
            raise

    async def open_pair(self, dispatch: Dispatch, take_seat: TakeSeat | None = None) -> Delivery:
        """Run both legs up to the first byte of the answer. Raises `LegFailed` of the leg at fault.

        `take_seat` says on which decode engine, where that is not yet known; the prefill leg has then been sent.
        """
        prefill: _Prefill = asyncio.create_task(self._prefill(dispatch))
        decode: _Decode = asyncio.create_task(self._decode_after(dispatch, prefill, take_seat))
        try:
            return Delivery(self, dispatch, await _first_byte(prefill, decode), prefill)
        except BaseException as error:
            await _end_both(prefill, decode)
            _give_up(dispatch, error)
            raise

    def end_later(self, dispatch: Dispatch, prefill: _Prefill, grace_s: float) -> None:
        """End a prefill leg that nobody waits for."""
        if prefill.done():
            _note_end(dispatch, prefill)
            return
        task = asyncio.create_task(self._end_prefill(dispatch, prefill, grace_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_prefill(self, dispatch: Dispatch, prefill: _Prefill, grace_s: float) -> None:
        await asyncio.wait((prefill,), timeout=grace_s)
        prefill.cancel()
        await asyncio.wait((prefill,))
        _note_end(dispatch, prefill)

    async def _decode_after(self, dispatch: Dispatch, prefill: _Prefill, take_seat: TakeSeat | None) -> Stream:
        if dispatch.hold_decode_s > 0:
            await asyncio.wait((prefill,), timeout=dispatch.hold_decode_s)
        if dispatch.decode is None and take_seat is not None:
            dispatch.decode = await take_seat()
        if is_concurrent(dispatch.connector):
            return await self._decode(dispatch, _push_body(dispatch))
        params = await asyncio.shield(prefill)
        return await self._decode(dispatch, _pull_body(dispatch, params))

    async def _decode(self, dispatch: Dispatch, body: bytes) -> Stream:
        seat = dispatch.decode
        assert seat is not None
        seat.engine.breaker.sent(time.monotonic())
        dispatch.timeline.mark("decode_sent")
        stream = await self._upstream.stream(seat.engine, dispatch.asked.route, body, dispatch.headers)
        dispatch.timeline.mark("first_byte")
        seat.written()
        seat.engine.succeeded()
        return stream

    async def _prefill(self, dispatch: Dispatch) -> msgspec.Raw | None:
        seat = dispatch.prefill
        assert seat is not None
        seat.engine.breaker.sent(time.monotonic())
        fields = prefill_fields(dispatch.asked.route, dispatch.asked.fields)
        body = with_params(fields, prefill_params(dispatch.connector, dispatch.key, dispatch.reuse))
        started = time.monotonic()
        try:
            dispatch.timeline.mark("prefill_sent")
            answer = await self._upstream.whole(seat.engine, dispatch.asked.route, body, dispatch.headers)
            params = read_prefill_answer(answer.body)
        except msgspec.DecodeError as error:
            detail = f"its answer is not JSON: {error}"
            raise broken_leg(seat.engine.role, seat.engine.url, Cause.BROKEN, detail) from None
        finally:
            seat.release()
        dispatch.timeline.mark("prefill_done")
        dispatch.reused_tokens = tokens_not_computed(dispatch.connector, params)
        seat.engine.prefilled(seat.queue_tokens, time.monotonic() - started)
        return params


async def _first_byte(prefill: _Prefill, decode: _Decode) -> Stream:
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


async def _end_both(prefill: _Prefill, decode: _Decode) -> None:
    """Cancel both legs at once, and take their outcomes so that nothing is left open or unobserved."""
    decode.cancel()
    prefill.cancel()
    await asyncio.wait((prefill, decode))
    if not prefill.cancelled():
        prefill.exception()
    if not decode.cancelled() and decode.exception() is None:
        decode.result().close()


def _give_up(dispatch: Dispatch, error: BaseException) -> None:
    dispatch.release()
    if isinstance(error, LegFailed):
        dispatch.fail(error)
        dispatch.suspect_prefill(error)


def _note_end(dispatch: Dispatch, prefill: _Prefill) -> None:
    """The prefill leg of an answer has ended: well, through our cancelling it, or with a failure nobody waited for."""
    if prefill.cancelled() or dispatch.prefill is None:
        return
    failure = prefill.exception()
    if failure is None:
        dispatch.prefill.engine.succeeded()
    elif isinstance(failure, LegFailed):
        dispatch.fail(failure)


def _push_body(dispatch: Dispatch) -> bytes:
    assert dispatch.prefill is not None
    identity = dispatch.prefill.engine.identity
    if identity is None:
        engine = dispatch.prefill.engine
        raise broken_leg(engine.role, engine.url, Cause.UNREACHABLE, f"its address is unknown: {engine.problem}")
    return with_params(dispatch.asked.fields, decode_params(dispatch.connector, dispatch.key, identity, dispatch.keep))


def _pull_body(dispatch: Dispatch, params: msgspec.Raw | None) -> bytes:
    if params is None:
        assert dispatch.prefill is not None
        engine = dispatch.prefill.engine
        detail = "its answer has no kv_transfer_params; is a KV connector configured on it?"
        raise broken_leg(engine.role, engine.url, Cause.BROKEN, detail)
    return with_params(dispatch.asked.fields, params)
