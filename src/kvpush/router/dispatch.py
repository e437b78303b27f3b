"""One try to serve a request under a key of its own: who was chosen for it, and what is known of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvpush.core.ids import Key
from kvpush.core.params import Reference
from kvpush.router.answers import Cause, LegFailed
from kvpush.router.asked import Asked
from kvpush.router.config import Connector, EngineRole
from kvpush.router.engine import Engine, Seat
from kvpush.router.first_token import Fate
from kvpush.router.timeline import Timeline


class Path(StrEnum):
    """Which way an answer came: the `x-kvpush-path` header and a counter's label."""

    PD = "pd"  # prefill engine and decode engine
    LOCAL = "local"  # the decode engine alone, on purpose
    RECOMPUTED = "recomputed"  # the decode engine alone, because prefill failed or the prompt did not come


@dataclass(eq=False, kw_only=True)
class Dispatch:
    """One try to serve a request under a key of its own.

    `decode` is set once a decode engine is chosen, for which `hold_decode_s` seconds are waited, or until the
    prefill leg has ended. `reuse` is where an earlier turn is kept, `keep` under which key this one is to be; so many
    tokens as `reused_tokens` were not computed. `first_token` is None when nobody wants to send it early.
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
    first_token: Fate | None = None
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

    def decode_begun(self, path: str) -> None:
        """The decode engine's answer is here, and says what only it knows: whether the prompt has come."""
        if self.path is Path.PD and path == Path.RECOMPUTED:
            self.path = Path.RECOMPUTED

    @property
    def awaited_engine(self) -> Engine:
        """Who has to go on with the answer."""
        seat = self.decode or self.prefill
        assert seat is not None
        return seat.engine

    def settle(self, fate: Fate) -> None:
        """What becomes of the first token is known."""
        self.first_token = fate
        contradictions = self.awaited_engine.contradictions
        if fate is Fate.UNCONFIRMED:
            contradictions.sent(time.monotonic())
        elif fate is Fate.FORWARDED:
            contradictions.succeeded()
        elif fate is Fate.CONTRADICTED:
            contradictions.failed(time.monotonic())

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
