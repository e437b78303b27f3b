"""Engine processes for tests: start one, talk to it, and be sure that nothing of it is left."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from engines.calls import (
    Abort,
    Add,
    Answer,
    Ask,
    Call,
    Collect,
    Go,
    Hold,
    Look,
    Quit,
    Ready,
    Remains,
    Reset,
    Settle,
    State,
)
from engines.child import serve

from kvpush.core.ids import Address, EngineId, Key, Target, TransferId
from kvpush.core.mode import Mode
from kvpush.core.params import receive_params, send_params
from kvpush.sim.forked import Forked
from kvpush.sim.orders import EngineConfig

START_S = 300.0
ANSWER_S = 100.0

_numbers = itertools.count()


class EngineDied(AssertionError):
    """An engine process has ended, or does not answer: the last lines of its log."""


class EngineProcess:
    """One real engine in a child process. Calls wait for their answer, at most `ANSWER_S`."""

    def __init__(self, config: EngineConfig, log: Path) -> None:
        self.config = config
        self._log = log
        self._process = Forked(serve, config, log)
        self._calls = self._process.line
        self._ready: Ready | None = None

    @property
    def ready(self) -> Ready:
        """Where the engine is; waits for it to be up."""
        if self._ready is None:
            self._ready = cast(Ready, self._receive(START_S))
        return self._ready

    def call(self, call: Call) -> Any:
        """Say something to the engine and return its answer."""
        assert self.ready
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._calls.send(call)
        return self._receive(ANSWER_S)

    def _receive(self, seconds: float) -> Any:
        with contextlib.suppress(EOFError, ConnectionError):
            if self._calls.poll(seconds):
                return self._calls.recv()
        tail = self._log.read_text(errors="replace")[-6000:]
        raise EngineDied(f"engine {self.config.name} gives no answer:\n{tail}")

    # requests -------------------------------------------------------------------------------------------
    def add(self, *asks: Ask) -> None:
        """Add requests and go on."""
        self.call(Add(asks))

    def collect(self, *asks: Ask) -> list[Answer]:
        """Wait for the answers to requests that were added."""
        return list(self.call(Collect(tuple(ask.request_id for ask in asks))))

    def ask(self, *asks: Ask) -> list[Answer]:
        """Add requests and wait for their answers."""
        self.add(*asks)
        return self.collect(*asks)

    def abort(self, *asks: Ask) -> None:
        """Abort requests as vLLM's API server does when a client leaves."""
        self.call(Abort(tuple(ask.request_id for ask in asks)))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The engine takes no step inside of the block."""
        self.call(Hold())
        try:
            yield
        finally:
            self.call(Go())

    # state ----------------------------------------------------------------------------------------------
    def look(self) -> State:
        """The engine's state now."""
        return cast(State, self.call(Look()))

    def settled(self) -> State:
        """The engine's state once nothing is going on."""
        return cast(State, self.call(Settle()))

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self.call(Reset()), "the prefix cache could not be emptied"

    @property
    def log_text(self) -> str:
        """Everything the engine has logged."""
        return self._log.read_text(errors="replace")

    # end ------------------------------------------------------------------------------------------------
    def stop(self) -> Remains:
        """Shut down as vLLM does."""
        remains = cast(Remains, self.call(Quit()))
        assert self._process.ended(ANSWER_S), f"engine {self.config.name} does not end"
        self._calls.close()
        return remains

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        self._process.kill()


class Pair:
    """A prefill and a decode engine, and requests that go through both."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess) -> None:
        self.prefill = prefill
        self.decode = decode
        self._sockets: dict[str, int] = {}

    def legs(self, ask: Ask, mode: Mode | None = None) -> tuple[Ask, Ask]:
        """The two legs of a request, as a router makes them: one for P, one for D."""
        key = new_key()
        ready = self.prefill.ready
        target = Target(Address(ready.host, ready.port), EngineId(ready.engine_id))
        return (
            replace(ask, max_tokens=1, logprobs=None, stop_token_ids=(), params=send_params(key)),
            replace(ask, params=receive_params(key, target, mode=mode)),
        )

    def ask(self, *asks: Ask) -> list[Answer]:
        """Send requests through both engines, both legs at once, and return D's answers."""
        legs = [self.legs(ask) for ask in asks]
        self.decode.add(*(decode for _, decode in legs))
        self.prefill.add(*(prefill for prefill, _ in legs))
        self.prefill.collect(*(prefill for prefill, _ in legs))
        return self.decode.collect(*(decode for _, decode in legs))

    def plain(self, *asks: Ask) -> list[Answer]:
        """The reference: D alone answers, from an empty cache, which it leaves empty."""
        self.decode.forget()
        answers = self.decode.ask(*(replace(ask, request_id=new_id()) for ask in asks))
        self.decode.forget()
        return answers

    def forget(self) -> None:
        """Empty both prefix caches."""
        self.prefill.forget()
        self.decode.forget()

    def assert_nothing_held(self) -> None:
        """I1: every block is free again on both engines, and no request, transfer, NIXL handle or socket is left.

        Two engines stay connected after their first transfer; from then on no socket is added.
        """
        for engine in (self.prefill, self.decode):
            state = engine.settled()
            assert state.free_blocks == engine.ready.free_blocks, f"{engine.config.name} has lost blocks: {state}"
            assert not state.requests, f"{engine.config.name} still has requests: {state}"
            assert not state.open_transfers, f"{engine.config.name} still has transfers: {state}"
            assert not state.writes, f"{engine.config.name} still has open NIXL handles: {state}"
            sockets = self._sockets.setdefault(engine.config.name, state.sockets)
            assert state.sockets <= sockets, f"{engine.config.name} has {state.sockets} sockets, and had {sockets}"


def new_key() -> Key:
    """A key that was never used before."""
    return Key(TransferId(os.urandom(16).hex()))


def new_id() -> str:
    """A request id as vLLM's completions endpoint makes them."""
    return f"cmpl-{next(_numbers)}-0"


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of `length` tokens, the same for the same seed, and unlike others from its first token on."""
    state, tokens = seed * 2654435761 + 12345, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append(3 + (state >> 33) % 200)
    return tuple(tokens)


@contextlib.contextmanager
def running(folder: Path, *configs: EngineConfig) -> Iterator[list[EngineProcess]]:
    """Engines, started side by side; none is left afterwards, and none has left a thread behind."""
    engines: list[EngineProcess] = []
    try:
        engines += [EngineProcess(config, folder / f"{config.name}.log") for config in configs]
        for engine in engines:
            assert engine.ready
        yield engines
        _stop_all(engines)
    finally:
        for engine in engines:
            engine.kill()


def _stop_all(engines: Sequence[EngineProcess]) -> None:
    for engine in engines:
        remains = engine.stop()
        assert remains == Remains(), f"{engine.config.name} leaves something behind: {remains}"


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a condition holds; the engines' answers set the pace of asking."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"does not hold after {seconds} s"
