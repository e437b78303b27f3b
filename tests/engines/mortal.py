"""A pair of engines that may be killed, started again where they were, and stopped for a while."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engines.calls import Answer, Ask
from engines.harness import EngineProcess, Pair, eventually, new_id, prompt_of

from kvpush.cli.ports import free_ports
from kvpush.sim.orders import EngineConfig

TIMES = {
    "heartbeat_s": 0.4,
    "lease_s": 3.0,
    "peer_timeout_s": 3.0,
    "connect_timeout_s": 2.0,
    "unannounced_s": 2.0,
    "doubt_s": 1.0,
    "quarantine_s": 2.0,
}


class MortalPair(Pair):
    """Its engines keep their names and ports over their deaths."""

    def __init__(self, folder: Path, prefill: EngineConfig, decode: EngineConfig) -> None:
        self._folder = folder
        self._lives = 0
        ports = free_ports(2)
        configs = [
            replace(config, extra={**TIMES, **config.extra, "port": port})
            for config, port in zip((prefill, decode), ports, strict=True)
        ]
        super().__init__(*(self._start(config) for config in configs))

    def _start(self, config: EngineConfig) -> EngineProcess:
        self._lives += 1
        return EngineProcess(config, self._folder / f"{config.name}-{self._lives}.log")

    def restart_prefill(self) -> None:
        """A new prefill engine, where the one that was killed has been."""
        self.prefill = self._start(self.prefill.config)
        assert self.prefill.ready

    def restart_decode(self) -> None:
        """A new decode engine, where the one that was killed has been."""
        self.decode = self._start(self.decode.config)
        assert self.decode.ready

    def assert_nothing_held(self) -> None:
        """As for other pairs, but sockets are not compared: NIXL leaves two behind each time that a peer is removed
        while its process lives (stopped, then found again), until one of the two processes ends."""
        self._sockets.clear()
        super().assert_nothing_held()

    def close(self) -> None:
        """Kill what lives."""
        for engine in (self.prefill, self.decode):
            engine.kill()

    def assert_serves(self) -> None:
        """I4, and what counts after trouble: both engines live, and a prompt goes from one to the other."""
        self.forget()
        ask = Ask(request_id=new_id(), prompt=prompt_of(150, seed=self._lives))
        (expected,) = self.plain(ask)
        before = _delivered(self.decode)

        def delivered() -> bool:
            (answer,) = self.ask(replace(ask, request_id=new_id()))
            self.decode.settled()
            _assert_right_or_failed(answer, expected)
            self.forget()
            return _delivered(self.decode) > before

        eventually(delivered)
        self.assert_nothing_held()


@contextlib.contextmanager
def stopped(engine: EngineProcess) -> Iterator[None]:
    """The engine's process does nothing at all inside of the block."""
    os.kill(engine.ready.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine.ready.pid, signal.SIGCONT)


def failed(engine: EngineProcess) -> int:
    """How many receives of an engine have failed since its start."""
    return sum(number for how, number in engine.look().transfers.items() if how.startswith("receiver failed"))


def counted(engine: EngineProcess, event: str) -> int:
    """How often an event has been counted since the engine's start, for whatever reason."""
    return sum(number for what, number in engine.look().counted.items() if what.startswith(f"{event} "))


def _delivered(engine: EngineProcess) -> int:
    return engine.look().transfers.get("receiver delivered ok", 0)


def _assert_right_or_failed(answer: Answer, expected: Answer) -> None:
    assert answer.tokens == expected.tokens or answer.choices[0].finish_reason == "error", "I2: wrong text"
