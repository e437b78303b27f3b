"""The engines of a soak: real ones, one process each, started, killed and started again."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from kvpush.core.errors import KVPushError
from kvpush.sim.forked import Forked
from kvpush.sim.orders import End, EngineConfig, Order, Report, Standing

_START_S = 300.0
_END_S = 60.0


class EngineLost(KVPushError):
    """An engine of the soak did not come up."""


@dataclass(frozen=True)
class Heard:
    """A report, and the engine that it is from."""

    engine: "Part"
    report: Report


class Part:
    """One engine. `life` counts its processes; `ready` is None while it is down."""

    def __init__(self, what: EngineConfig, log: Path) -> None:
        self.what = what
        self.log = log
        self.life = 0
        self.ready: Standing | None = None
        self._process = self._fork()

    @property
    def name(self) -> str:
        """The engine's, in logs and counts."""
        return self.what.name

    @property
    def line(self) -> Connection:
        """Where it reports."""
        return self._process.line

    def start(self) -> None:
        """A new process; its first report says that it is up."""
        self._process = self._fork()

    def _fork(self) -> Forked:
        self.life += 1
        return Forked(_serve, self.what, self.log)

    def say(self, order: Order) -> None:
        """Give an order; one to an engine that has died is lost with it."""
        try:
            self.line.send(order)
        except OSError:
            self.ready = None

    def kill(self) -> None:
        """End the process at once, without a word."""
        self._process.kill()
        self.ready = None

    def bury(self) -> str:
        """Let go of a process that has ended by itself; says what became of it."""
        self._process.ended(_END_S)
        self.kill()
        return f"{self.name} (status {self._process.status})"

    def stop(self) -> None:
        """Shut down as vLLM does."""
        self.say(End())
        if not self._process.ended(_END_S):
            self.kill()


def _serve(what: EngineConfig, line: Connection) -> None:
    """In the child: only there vLLM is imported, and there it has been already."""
    from kvpush.sim.obedient import serve

    serve(what, line)


class Fleet:
    """All engines. `died` names those that ended without being told to."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.died: list[str] = []

    def hear(self, seconds: float) -> Iterator[Heard]:
        """What the engines report within so many seconds, or at once if there is something."""
        lines = {part.line: part for part in self.parts if not part.line.closed}
        for line in wait(list(lines), seconds):
            assert isinstance(line, Connection)
            part = lines[line]
            try:
                while line.poll():
                    yield Heard(part, self._note(part, line.recv()))
            except (EOFError, ConnectionError):
                self.died.append(part.bury())

    def _note(self, part: Part, report: Report) -> Report:
        if part.ready is None and isinstance(report, Standing):
            part.ready = report
        return report

    def wait_for_the_living(self) -> None:
        """Wait until engines that have been started again are up, for as long as a start may take; those that have died
        are not waited for."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and any(not part.ready and not part.line.closed for part in self.parts):
            for _ in self.hear(1.0):
                pass

    def wait_until_ready(self) -> None:
        """Raises `EngineLost`."""
        deadline = time.monotonic() + _START_S
        while not all(part.ready for part in self.parts):
            for _ in self.hear(1.0):
                pass
            late = ", ".join(part.name for part in self.parts if part.ready is None)
            if self.died or time.monotonic() > deadline:
                raise EngineLost(f"not up: {late}; see {self.parts[0].log.parent}")


@contextmanager
def fleet(engines: Sequence[EngineConfig], logs: Path) -> Iterator[Fleet]:
    """Start engines side by side, each with a log in the folder `logs`; none is left afterwards."""
    parts: list[Part] = []
    try:
        parts += [Part(what, logs / f"{what.name}.log") for what in engines]
        yield Fleet(parts)
    finally:
        for part in parts:
            if not part.line.closed:
                part.kill()
