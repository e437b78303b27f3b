"""The engines this router knows, and the tasks that watch them."""

import asyncio
import random
import time
from collections.abc import Mapping

from kvpush.core.errors import ConfigError
from kvpush.router.asked import Asked
from kvpush.router.config import EngineRole, EngineSpec, RouterConfig
from kvpush.router.connectors import needs_identity
from kvpush.router.discovery import poll_forever
from kvpush.router.engine import Duty, Engine, Seat
from kvpush.router.picker import pick
from kvpush.router.upstream import Upstream

_NO_IDENTITY = "its /metrics shows no kvpush_engine_info; is KVPushConnector configured on it?"


class Fleet:
    """Owned by the event loop's thread."""

    def __init__(self, config: RouterConfig, upstream: Upstream) -> None:
        self._config = config
        self._upstream = upstream
        self._engines: dict[str, Engine] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._rng = random.Random()
        self.room = asyncio.Event()

    def start(self) -> None:
        """Begin to watch the configured engines."""
        for spec in self._config.prefill:
            self.add(spec, EngineRole.PREFILL)
        for spec in self._config.decode:
            self.add(spec, EngineRole.DECODE)

    async def aclose(self) -> None:
        """Stop watching."""
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    def add(self, spec: EngineSpec, role: EngineRole) -> Engine:
        """Begin to watch one more engine; a drained one serves again. Raises `ConfigError`."""
        known = self._engines.get(spec.url)
        if known is not None and (known.spec, known.role) != (spec, role):
            problem = f"{spec.url} is known already as a {known.role} engine with other settings"
            raise ConfigError("engine", problem, "Remove it first.")
        if known is not None:
            known.duty = Duty.ON
            return known
        engine = self._engines[spec.url] = Engine(spec, role, room=self.room)
        self._watchers[spec.url] = asyncio.create_task(
            poll_forever(self._upstream, engine, self._config.poll_s), name=f"watch {spec.url}"
        )
        return engine

    def known(self, url: str) -> Engine | None:
        """An engine by its URL, None when there is none."""
        return self._engines.get(url)

    def find(self, url: str) -> Engine:
        """An engine by its URL. Raises `ConfigError`."""
        engine = self.known(url)
        if engine is None:
            raise ConfigError("engine", f"{url} is not known here", "Use the URL as GET /admin/engines shows it.")
        return engine

    def remove(self, url: str) -> Engine:
        """Forget an engine; legs it still has go on to their end. Raises `ConfigError`."""
        engine = self.find(url)
        del self._engines[url]
        self._watchers.pop(url).cancel()
        self.room.set()
        return engine

    def engines(self) -> list[Engine]:
        """Every engine, in the order they were added."""
        return list(self._engines.values())

    def of(self, role: EngineRole) -> list[Engine]:
        """Every engine of one role."""
        return [engine for engine in self._engines.values() if engine.role is role]

    def usable(self, role: EngineRole, avoid: str = "") -> list[Engine]:
        """The engines that a leg may be sent to now; `avoid` is among them only when it is the last resort.

        A circuit breaker that is open keeps an engine out while there is another; the last one is always tried.
        """
        now = time.monotonic()
        ready = [engine for engine in self.of(role) if engine.duty is Duty.ON and not self._unready(engine)]
        for choice in (
            [engine for engine in ready if engine.url != avoid and engine.breaker.allows(now)],
            [engine for engine in ready if engine.url != avoid],
        ):
            if choice:
                return choice
        return ready

    def prefill_seat(self, asked: Asked, avoid: Mapping[EngineRole, str]) -> Seat | None:
        """A seat on the best prefill engine; None when none is usable."""
        engine = pick(self.usable(EngineRole.PREFILL, avoid[EngineRole.PREFILL]), asked, self._rng)
        return engine.admit(asked) if engine else None

    def _unready(self, engine: Engine) -> str:
        """Why an engine cannot be used; "" when it can."""
        if engine.sample is None:
            return engine.problem
        must_be_named = engine.role is EngineRole.PREFILL and needs_identity(self._config.connector)
        return _NO_IDENTITY if must_be_named and engine.identity is None else ""

    def problems(self) -> list[str]:
        """Why the router cannot serve; empty when it can."""
        roles = [EngineRole.DECODE] + ([EngineRole.PREFILL] if self._config.prefill else [])
        return [problem for role in roles if not self.usable(role) for problem in self._why_unusable(role)]

    def _why_unusable(self, role: EngineRole) -> list[str]:
        engines = self.of(role)
        if not engines:
            return [f"no {role} engine is known"]
        return [f"{role} engine {engine.url}: {self._unready(engine) or engine.duty}" for engine in engines]
