"""One engine as the router sees it: everything known of it in one record."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from kvpush.core.ids import Target
from kvpush.router.answers import Cause, LegFailed
from kvpush.router.asked import Asked
from kvpush.router.breaker import Breaker
from kvpush.router.config import EngineRole, EngineSpec
from kvpush.router.prefixes import Prefixes
from kvpush.router.scrape import FIRST_TOKEN_USED, Sample


@dataclass(frozen=True)
class Identity:
    """What the other leg must know of a prefill engine."""

    target: Target
    tp_size: int


class Duty(StrEnum):
    """What an operator wants of an engine."""

    ON = "on"
    DRAINING = "draining"  # finishes what it has, gets nothing new


@dataclass(eq=False)
class Engine:
    """State lives on the event loop's thread.

    `sample` is None until a poll has worked, and again after one has failed; `problem` says why the last one
    did. `requests` and `tokens` are the router's own legs in flight, `unwritten_tokens` those promised to a
    decode engine whose KV has not arrived yet. `refresh` asks for a poll now; `room` says that promises shrank.
    `generation` counts the engine's starts. `contradictions` keeps first tokens from being sent early when answers
    have not begun with them; `begins_with_first_tokens` is what the engine itself said last.
    """

    spec: EngineSpec
    role: EngineRole
    sample: Sample | None = None
    problem: str = "not polled yet"
    duty: Duty = Duty.ON
    requests: int = 0
    tokens: int = 0
    unwritten_tokens: int = 0
    generation: int = 0
    served: int = 0
    failed: Counter[Cause] = field(default_factory=Counter)
    breaker: Breaker = field(default_factory=Breaker)
    contradictions: Breaker = field(default_factory=Breaker)
    begins_with_first_tokens: bool = False
    prefixes: Prefixes = field(default_factory=Prefixes)
    refresh: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    _requests_at_poll: int = 0
    _tokens_per_s: float | None = None

    @property
    def url(self) -> str:
        """The engine's name in logs, metrics and errors."""
        return self.spec.url

    @property
    def identity(self) -> Identity | None:
        """Whom a decode engine must ask; the configuration's own values win over what the engine says."""
        seen = self.sample.identity if self.sample else None
        address = self.spec.control or (seen.target.address if seen else None)
        if address is None:
            return None
        engine_id = self.spec.engine_id or (seen.target.engine_id if seen else None)
        return Identity(Target(address, engine_id), seen.tp_size if seen else self.spec.tp_size)

    @property
    def foreign_requests(self) -> float:
        """Requests the engine had at the last poll beyond ours: those of other routers."""
        if self.sample is None or self.sample.running is None:
            return 0.0
        return max(self.sample.running + (self.sample.waiting or 0.0) - self._requests_at_poll, 0.0)

    @property
    def pool_tokens(self) -> int | None:
        """Tokens the engine's whole KV pool holds."""
        if self.sample is None or self.sample.total_blocks is None or self.sample.block_size is None:
            return None
        return self.sample.total_blocks * self.sample.block_size

    def kv_fill(self, more_tokens: int) -> float:
        """The fraction of the KV pool in use once everything promised and `more_tokens` have arrived."""
        if self.sample is None or not self.pool_tokens:
            return 0.0
        return (self.sample.kv_usage or 0.0) + (self.unwritten_tokens + more_tokens) / self.pool_tokens

    def polled(self, sample: Sample) -> None:
        """A poll has worked. A restarted engine has an empty cache and a clean record."""
        before = self.sample
        if before is None or (before.identity, before.started_at) != (sample.identity, sample.started_at):
            self.generation += 1
            self.prefixes.clear()
            self.breaker.succeeded()
        seen = sample.identity
        self.begins_with_first_tokens = seen is not None and seen.first_token == FIRST_TOKEN_USED
        self.sample, self.problem, self._requests_at_poll = sample, "", self.requests

    def unreachable(self, problem: str) -> None:
        """A poll has failed."""
        self.sample, self.problem = None, problem

    def succeeded(self) -> None:
        """A leg has ended well."""
        self.served += 1
        self.breaker.succeeded()

    def leg_failed(self, failure: LegFailed, now: float) -> None:
        """A leg has failed; `now` is a monotonic clock in seconds."""
        self.failed[failure.cause] += 1
        if failure.engines_fault:
            self.breaker.failed(now)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prefill leg with `tokens` in front of and in it took `seconds`; what is remembered fades by halves."""
        rate = tokens / max(seconds, 1e-3)
        self._tokens_per_s = rate if self._tokens_per_s is None else (self._tokens_per_s + rate) / 2

    def prefill_eta_s(self, tokens: int) -> float:
        """How long `tokens` of prompt will take to compute here, by experience; 0 without any."""
        return tokens / self._tokens_per_s if self._tokens_per_s else 0.0

    def admit(self, asked: Asked) -> "Seat":
        """Count a leg until its seat is given back."""
        self.requests += asked.sub_requests
        self.tokens += asked.tokens
        self.unwritten_tokens += asked.tokens
        self.prefixes.add(asked.prefix)
        return Seat(self, asked)


class Seat:
    """One leg's share of an engine's load. `queue_tokens`: what was in flight there, this leg included."""

    def __init__(self, engine: Engine, asked: Asked) -> None:
        self.engine = engine
        self.queue_tokens = engine.tokens
        self._asked = asked
        self._is_written = False
        self._is_released = False

    def written(self) -> None:
        """The leg's KV is in the engine's pool, where polls see it. Idempotent."""
        if not self._is_written:
            self._is_written = True
            self.engine.unwritten_tokens -= self._asked.tokens
            self.engine.room.set()

    def release(self) -> None:
        """The leg has ended. Idempotent."""
        self.written()
        if not self._is_released:
            self._is_released = True
            self.engine.requests -= self._asked.sub_requests
            self.engine.tokens -= self._asked.tokens
