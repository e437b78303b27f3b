"""Both legs of one dispatch, one fate.

Where the connector allows it both legs are sent at once. Until the first byte of the answer has come, the first
leg that fails ends the other; after that, closing the answer does. A leg is ended by closing its connection,
which is how an engine learns that nobody wants the answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine

import msgspec

from kvpush.router.ahead import Ahead, DecodeLeg
from kvpush.router.answers import Cause, LegFailed, broken_leg
from kvpush.router.body import encode, with_params
from kvpush.router.connectors import decode_params, is_concurrent
from kvpush.router.dispatch import Dispatch
from kvpush.router.engine import Seat
from kvpush.router.first_token import Fate, FirstToken
from kvpush.router.prefill_leg import Prefilled, run_prefill
from kvpush.router.upstream import Stream, Upstream

CAUSE_GRACE_S = 0.05
"""How long a decode leg's failure waits for the prefill leg's, which is then likely its cause."""

LINGER_S = 0.25
"""How long a prefill leg may outlive a complete answer; its own answer is normally on its way by then."""

TakeSeat = Callable[[], Awaitable[Seat]]


class Delivery:
    """An answer that has begun: relay `stream`, then `finish()` when it came to its end, in any case `close()`."""

    def __init__(self, legs: "Legs", dispatch: Dispatch, stream: Stream | Ahead, prefill: "_Prefill | None") -> None:
        self.dispatch = dispatch
        self.stream = stream
        self._legs = legs
        self._prefill = prefill
        self._grace_s = 0.0

    def finish(self) -> None:
        """The answer is complete: the prefill leg's own answer may still come in a moment."""
        self._grace_s = LINGER_S

    def failed(self, failure: LegFailed) -> None:
        """The answer broke off. Where it had not come from the decode engine yet, its prompt may not have either."""
        self.dispatch.fail(failure)
        if self.dispatch.first_token is Fate.UNCONFIRMED:
            self.dispatch.suspect_prefill(failure)

    def close(self) -> None:
        """End what is left of both legs, without waiting for it."""
        self.stream.close()
        if self.dispatch.decode is not None:
            self.dispatch.decode.release()
        if self._prefill is not None:
            self._legs.end_later(self.dispatch, self._prefill, self._grace_s)


_Prefill = asyncio.Task[Prefilled]


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
            stream = await self._decode(dispatch, encode(dispatch.asked.fields))
            dispatch.timeline.mark("first_byte")
            return Delivery(self, dispatch, stream, None)
        except BaseException as error:
            _give_up(dispatch, error)
            raise

    async def open_pair(self, dispatch: Dispatch, take_seat: TakeSeat | None = None) -> Delivery:
        """Run both legs up to the first byte of the answer. Raises `LegFailed` of the leg at fault.

        `take_seat` says on which decode engine, where that is not yet known; the prefill leg has then been sent.
        """
        prefill: _Prefill = asyncio.create_task(run_prefill(self._upstream, dispatch, self._outlive))
        decode: DecodeLeg = asyncio.create_task(self._decode_after(dispatch, prefill, take_seat))
        try:
            stream = await self._first_byte(dispatch, prefill, decode)
            dispatch.timeline.mark("first_byte")
            return Delivery(self, dispatch, stream, prefill)
        except BaseException as error:
            await _end_both(prefill, decode)
            _give_up(dispatch, error)
            raise

    async def _first_byte(self, dispatch: Dispatch, prefill: _Prefill, decode: DecodeLeg) -> Stream | Ahead:
        await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
        token = None if decode.done() else prefill.result().first_token
        if dispatch.first_token is Fate.UNDECIDED:
            dispatch.settle(_fate(dispatch, token, decode))
        if token is not None and dispatch.first_token is Fate.UNCONFIRMED:
            return Ahead(token, decode, lambda: dispatch.awaited_engine, dispatch.settle, self._abandon)
        return await _answer_of(prefill, decode)

    def _abandon(self, decode: DecodeLeg) -> None:
        """End a decode leg whose client has left."""
        decode.cancel()
        self._outlive(_dispose(decode))

    def _outlive(self, ending: Coroutine[None, None, None]) -> None:
        """Let something end that nobody waits for."""
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def end_later(self, dispatch: Dispatch, prefill: _Prefill, grace_s: float) -> None:
        """End a prefill leg that nobody waits for."""
        if prefill.done():
            _note_end(dispatch, prefill)
            return
        self._outlive(self._end_prefill(dispatch, prefill, grace_s))

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
        prefilled = await asyncio.shield(prefill)
        return await self._decode(dispatch, _pull_body(dispatch, prefilled.params))

    async def _decode(self, dispatch: Dispatch, body: bytes) -> Stream:
        seat = dispatch.decode
        assert seat is not None
        seat.engine.breaker.sent(time.monotonic())
        dispatch.timeline.mark("decode_sent")
        stream = await self._upstream.stream(seat.engine, dispatch.asked.route, body, dispatch.headers)
        dispatch.timeline.mark("decode_begun")
        dispatch.decode_begun(stream.path)
        seat.written()
        seat.engine.succeeded()
        return stream


def _fate(dispatch: Dispatch, token: FirstToken | None, decode: DecodeLeg) -> Fate:
    """Whether the token is sent early, which is then not confirmed yet, or why not."""
    if decode.done():
        return Fate.LATE
    if token is None:
        return Fate.NO_TEXT
    if dispatch.decode is None or not dispatch.decode.engine.begins_with_first_tokens:
        return Fate.UNSUPPORTED
    trusted = dispatch.decode.engine.contradictions.allows(time.monotonic())
    return Fate.UNCONFIRMED if trusted else Fate.DISTRUSTED


async def _answer_of(prefill: _Prefill, decode: DecodeLeg) -> Stream:
    """The decode leg's answer, or the failure that explains why there is none."""
    await asyncio.wait((decode,))
    failure = decode.exception()
    if failure is None:
        return decode.result()
    if _may_come_of_prefill(failure) and not prefill.done():
        await asyncio.wait((prefill,), timeout=CAUSE_GRACE_S)
    if prefill.done():
        prefill.result()
    raise failure


def _may_come_of_prefill(failure: BaseException) -> bool:
    """Not where the decode engine was not reached: to wait would only let the prefill engine compute for nobody."""
    return isinstance(failure, LegFailed) and failure.engines_fault and failure.cause is not Cause.UNREACHABLE


async def _dispose(decode: DecodeLeg) -> None:
    """Take the outcome of a cancelled leg, so that nothing is left open or unobserved."""
    await asyncio.wait((decode,))
    if not decode.cancelled() and decode.exception() is None:
        decode.result().close()


async def _end_both(prefill: _Prefill, decode: DecodeLeg) -> None:
    """Cancel both legs at once, and take their outcomes so that nothing is left open or unobserved."""
    decode.cancel()
    prefill.cancel()
    await asyncio.wait((prefill,))
    if not prefill.cancelled():
        prefill.exception()
    await _dispose(decode)


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
