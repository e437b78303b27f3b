"""An answer that begins with the prefill engine's first token and goes on with the decode engine's stream.

It has what `relay.py` needs of a `Stream`. Until the decode engine has said what the client has been sent, its chunks
are compared with that; from then on they are passed on unread.
"""

import asyncio
from collections.abc import Callable

from kvpush.router.answers import Cause, LegFailed, RequestRefused, broken_leg
from kvpush.router.config import EngineRole
from kvpush.router.engine import Engine
from kvpush.router.first_token import Fate, FirstToken
from kvpush.router.overlap import Contradiction, Overlap
from kvpush.router.upstream import ERROR_EVENT, Stream, failed_event

DecodeLeg = asyncio.Task[Stream]


class Ahead:
    """Close it. `engine` says from which engine more is expected."""

    status = 200
    content_type = "text/event-stream; charset=utf-8"
    content_length = None
    is_events = True

    def __init__(
        self,
        token: FirstToken,
        decode: DecodeLeg,
        engine: Callable[[], Engine],
        settle: Callable[[Fate], None],
        abandon: Callable[[DecodeLeg], None],
    ) -> None:
        """`settle` is told what becomes of the token, `abandon` ends a decode leg that has not begun to answer."""
        self.first = token.events
        self._decode = decode
        self._engine = engine
        self._settle = settle
        self._abandon = abandon
        self._overlap = Overlap(token.text)
        self._stream: Stream | None = None

    @property
    def engine(self) -> Engine:
        """From which engine more is expected."""
        return self._engine()

    @property
    def said_done(self) -> bool:
        """True once the last event is here."""
        return self._stream is not None and self._overlap.is_over and self._stream.said_done

    @property
    def is_complete(self) -> bool:
        """True once nothing will come after what was handed over last."""
        return self._stream is not None and self._overlap.is_over and self._stream.is_complete

    async def next_chunk(self) -> bytes:
        """More of the answer, b"" at its end. Raises `LegFailed` when it breaks off, or contradicts the token."""
        if self._stream is not None and self._overlap.is_over:
            return await self._stream.next_chunk()
        return await self._beyond()

    async def _beyond(self) -> bytes:
        """The first bytes of the decode engine that go beyond the token."""
        while not self._overlap.is_over:
            chunk = await self._next_of_decode()
            if beyond := self._compare(chunk):
                return beyond
        assert self._stream is not None
        return await self._stream.next_chunk()

    async def _next_of_decode(self) -> bytes:
        if self._stream is not None:
            return await self._stream.next_chunk()
        await asyncio.wait((self._decode,))
        try:
            self._stream = self._decode.result()
        except RequestRefused as refused:  # there was no room on any decode engine
            raise LegFailed(EngineRole.DECODE, "none", Cause.REFUSED, refused.answer) from None
        return self._stream.first

    def _compare(self, chunk: bytes) -> bytes:
        """What of a chunk goes beyond the token."""
        engine = self.engine
        if not chunk:
            raise broken_leg(engine.role, engine.url, Cause.BROKEN, "its answer ended before the first token")
        try:
            beyond = self._overlap.feed(chunk)
        except Contradiction as error:
            raise self._failure(engine, error) from None
        if self._overlap.is_over:
            self._settle(Fate.FORWARDED)
        return beyond

    def _failure(self, engine: Engine, error: Contradiction) -> LegFailed:
        if error.event.startswith(ERROR_EVENT):
            return failed_event(engine, error.event)
        self._settle(Fate.CONTRADICTED)
        return broken_leg(engine.role, engine.url, Cause.CONTRADICTED, str(error))

    def close(self) -> None:
        """Stop: the engine sees its client leave unless the answer was complete. Idempotent."""
        if self._stream is not None:
            self._stream.close()
        else:
            self._abandon(self._decode)
