"""The engines this router knows, and the tasks that watch them."""

import asyncio
from itertools import count

from kvpush.router.config import EngineRole, RouterConfig
from kvpush.router.connectors import needs_identity
from kvpush.router.discovery import poll_forever
from kvpush.router.engine import Engine
from kvpush.router.upstream import Upstream


class Fleet:
    """Owned by the event loop's thread."""

    def __init__(self, config: RouterConfig, upstream: Upstream) -> None:
        self._config = config
        self._upstream = upstream
        self._engines = {spec.url: Engine(spec, EngineRole.PREFILL) for spec in config.prefill}
        self._engines |= {spec.url: Engine(spec, EngineRole.DECODE) for spec in config.decode}
        self._watchers: list[asyncio.Task[None]] = []
        self._turn = {role: count() for role in EngineRole}

    def start(self) -> None:
        """Begin to watch every engine."""
        for engine in self._engines.values():
            task = asyncio.create_task(poll_forever(self._upstream, engine, self._config.poll_s))
            self._watchers.append(task)

    async def aclose(self) -> None:
        """Stop watching."""
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def of(self, role: EngineRole) -> list[Engine]:
        """Every engine of one role."""
        return [engine for engine in self._engines.values() if engine.role is role]

    def usable(self, role: EngineRole) -> list[Engine]:
        """The engines of one role that a request may be sent to now."""
        must_be_named = role is EngineRole.PREFILL and needs_identity(self._config.connector)
        return [
            engine
            for engine in self.of(role)
            if engine.sample is not None and not (must_be_named and engine.identity is None)
        ]

    def choose(self, role: EngineRole, avoid: str) -> Engine | None:
        """The engine for the next leg, another than `avoid` when there is one; None when none is usable."""
        usable = self.usable(role)
        choices = [engine for engine in usable if engine.url != avoid] or usable
        return choices[next(self._turn[role]) % len(choices)] if choices else None

    def problems(self) -> list[str]:
        """Why the router cannot serve; empty when it can."""
        roles = [EngineRole.DECODE] + ([EngineRole.PREFILL] if self._config.prefill else [])
        return [problem for role in roles if not self.usable(role) for problem in self._why_unusable(role)]

    def _why_unusable(self, role: EngineRole) -> list[str]:
        return [
            f"{role} engine {engine.url}: "
            + (engine.problem or "its /metrics shows no kvpush_engine_info; is KVPushConnector configured on it?")
            for engine in self.of(role)
        ]
