"""A cluster on this machine: engines and a router as child processes, from start to end.

    with Cluster(spec) as cluster:
        ...  # cluster.url, cluster.engines

Entering returns when every part is ready; leaving, in whatever way, leaves no process behind.
"""

import http.client
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from kvpush.cli.child import Child
from kvpush.cli.parts import (
    ClusterSpec,
    Command,
    Engine,
    engine_command,
    plan_engines,
    router_command,
    share_machine,
)
from kvpush.cli.ports import free_ports, listen_error
from kvpush.cli.secret import secret_file
from kvpush.core.errors import ConfigError, KVPushError
from kvpush.router.config import Connector, EngineRole

_POLL_S = 0.2


class StartTimeout(KVPushError):
    """A part was not ready in time; it has been stopped."""


@dataclass(frozen=True)
class PartStatus:
    """How far one part is. `seconds` counts from its start until it was ready, or until now."""

    name: str
    is_ready: bool
    seconds: float
    last_line: str


Observer = Callable[[tuple[PartStatus, ...]], None]
"""Called a few times a second while the cluster starts."""


class _Part:
    def __init__(self, name: str, url: str, command: Command, spec: ClusterSpec) -> None:
        self.name = name
        self.url = url
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.child = Child(name, command, spec.log_dir / f"{name}.log")

    def look(self) -> PartStatus:
        """Raises `PartDied`."""
        self.child.check()
        if self.ready_at is None and is_healthy(self.url):
            self.ready_at = time.monotonic()
        until = self.ready_at or time.monotonic()
        return PartStatus(self.name, self.ready_at is not None, until - self.started_at, self.child.tail(1))


class Cluster:
    """Owned by one thread, but for `check`, which may be called from any."""

    def __init__(self, spec: ClusterSpec, observer: Observer | None = None) -> None:
        """Plan it; nothing is started yet. Raises `ConfigError` when the ports are taken."""
        if error := listen_error(spec.port, spec.host):
            found = f"{spec.host}:{spec.port} cannot be listened on: {error}"
            raise ConfigError("host/port", found, "Choose an address of this machine and a free port, or port 0.")
        self.spec = spec
        self.engines = plan_engines(spec)
        self.port = spec.port or free_ports(1, 1, spec.host)[0]
        self._observer = observer or (lambda _: None)
        self._parts: list[_Part] = []
        self._kept = ExitStack()

    @property
    def url(self) -> str:
        """The base URL of the router's OpenAI API."""
        return f"http://{self.spec.host}:{self.port}"

    @property
    def prefill(self) -> tuple[Engine, ...]:
        """The prefill engines."""
        return tuple(engine for engine in self.engines if engine.role is EngineRole.PREFILL)

    @property
    def decode(self) -> tuple[Engine, ...]:
        """The decode engines."""
        return tuple(engine for engine in self.engines if engine.role is EngineRole.DECODE)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise `PartDied` if any part has ended."""
        for part in self._parts:
            part.child.check()

    def pids(self) -> dict[str, int]:
        """The process that each part's processes descend from, by the part's name."""
        return {part.name: part.child.pid for part in self._parts}

    def stop(self) -> None:
        """End every part, the router first; idempotent."""
        for part in reversed(self._parts):
            part.child.ask_to_stop()
        for part in self._parts:
            part.child.stop()
        self._parts.clear()
        self._kept.close()

    def _start(self) -> None:
        self._make_log_dir()
        shares = share_machine(sorted(os.sched_getaffinity(0)), self.spec.device.gpus, len(self.engines))
        spec = self._with_secret()
        for engine, share in zip(self.engines, shares, strict=True):
            self._add(engine.name, engine.url, engine_command(spec, engine, share))
        self._wait_until_ready()
        self._add("router", self.url, router_command(self.spec, self.engines, self.port))
        self._wait_until_ready()

    def _with_secret(self) -> ClusterSpec:
        """Nobody but these engines has anything to say on their control channels, unless the user sees to it."""
        config = self.spec.connector_config
        if self.spec.connector is not Connector.KVPUSH or config.keys() & {"secret", "secret_file"}:
            return self.spec
        path = self._kept.enter_context(secret_file())
        return replace(self.spec, connector_config={**config, "secret_file": str(path)})

    def _make_log_dir(self) -> None:
        folder = self.spec.log_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{folder} cannot be made: {error.strerror}"
            raise ConfigError("log_dir", problem, "Name a folder that can be written.") from None

    def _add(self, name: str, url: str, command: Command) -> None:
        self._parts.append(_Part(name, url, command, self.spec))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.spec.start_timeout_s
        while True:
            statuses = tuple(part.look() for part in self._parts)
            self._observer(statuses)
            if all(status.is_ready for status in statuses):
                return
            if time.monotonic() > deadline:
                late = ", ".join(status.name for status in statuses if not status.is_ready)
                raise StartTimeout(f"{late} not ready after {self.spec.start_timeout_s:.0f} s; see {self.spec.log_dir}")
            time.sleep(_POLL_S)


def is_healthy(url: str, timeout_s: float = 1.0) -> bool:
    """Whether `GET /health` at the base `url` answers 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
