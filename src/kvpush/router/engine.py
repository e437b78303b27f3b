"""One engine as the router sees it: everything known of it in one record."""

import asyncio
from dataclasses import dataclass, field

from kvpush.core.ids import Target
from kvpush.router.config import EngineRole, EngineSpec
from kvpush.router.scrape import Sample


@dataclass(frozen=True)
class Identity:
    """What the other leg must know of a prefill engine."""

    target: Target
    tp_size: int


@dataclass(eq=False)
class Engine:
    """State lives on the event loop's thread. `sample` is None until a poll has worked, and again after
    one has failed; `problem` says why the last one did."""

    spec: EngineSpec
    role: EngineRole
    sample: Sample | None = None
    problem: str = "not polled yet"
    requests: int = 0
    tokens: int = 0
    refresh: asyncio.Event = field(default_factory=asyncio.Event)

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

    def admit(self, tokens: int) -> "Ticket":
        """Count a leg of about `tokens` prompt tokens until the ticket is given back."""
        self.requests += 1
        self.tokens += tokens
        return Ticket(self, tokens)


class Ticket:
    """One leg's share of an engine's load."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine = engine
        self._tokens: int | None = tokens

    def release(self) -> None:
        """The leg has ended. Idempotent."""
        if self._tokens is None:
            return
        self._engine.requests -= 1
        self._engine.tokens -= self._tokens
        self._tokens = None
