"""The engines of a soak: real ones, one process each, started, killed and started again.

They are forked from one process that has imported vLLM, because importing takes longer than all else about them.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from kvpush.core.errors import KVPushError
from kvpush.sim.orders import End, Order, Report, Standing, SteppedEngine

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

_START_S = 300.0
_END_S = 60.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class EngineLost(KVPushError):
    """An engine of the soak did not come up."""


@dataclass(frozen=True)
class Heard:
    """A report, and the engine that it is from."""

    engine: "Part"
    report: Report


class Part:
    """One engine. `life` counts its processes; `ready` is None while it is down."""

    def __init__(self, what: SteppedEngine) -> None:
        self.what = what
        self.life = 0
        self.ready: Standing | None = None
        self.started_at = 0.0
        self.line: Connection
        self.process: ForkServerProcess
        self.start()

    @property
    def name(self) -> str:
        """The engine's, in logs and counts."""
        return self.what.name

    def start(self) -> None:
        """A new process; its first report says that it is up."""
        context = multiprocessing.get_context("forkserver")
        self.line, theirs = context.Pipe()
        with theirs:
            self.process = context.Process(target=_serve, args=(self.what, theirs), daemon=True)
            self.process.start()
        self.life += 1
        self.started_at = time.monotonic()

    def say(self, order: Order) -> None:
        """Give an order; one to an engine that has died is lost with it."""
        try:
            self.line.send(order)
        except OSError:
            self.ready = None

    def kill(self) -> None:
        """End the process at once, without a word."""
        self.process.kill()
        self.process.join(_END_S)
        self.ready = None
        self.line.close()

    def stop(self) -> None:
        """Shut down as vLLM does."""
        self.say(End())
        self.process.join(_END_S)
        if self.process.is_alive():
            self.kill()


def _serve(what: SteppedEngine, line: Connection) -> None:
    """In the child: only there vLLM is imported, and there it has been already."""
    from kvpush.sim.stepped import serve

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
                self._lost(part)

    def _note(self, part: Part, report: Report) -> Report:
        if part.ready is None and isinstance(report, Standing):
            part.ready = report
        return report

    def _lost(self, part: Part) -> None:
        part.process.join(_END_S)
        part.line.close()
        part.ready = None
        self.died.append(f"{part.name} (status {part.process.exitcode})")

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
                raise EngineLost(f"not up: {late}; see {self.parts[0].what.log.parent}")


@contextmanager
def fleet(engines: Sequence[SteppedEngine]) -> Iterator[Fleet]:
    """Start engines side by side; none is left afterwards."""
    os.environ.update(_ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvpush.sim.stepped", "vllm.model_executor.models.llama"])
    parts: list[Part] = []
    try:
        parts += [Part(what) for what in engines]
        yield Fleet(parts)
    finally:
        for part in parts:
            if not part.line.closed:
                part.kill()
