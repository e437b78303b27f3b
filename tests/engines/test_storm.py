"""Nine of ten clients leave within moments: the others, and those that come afterwards, are served as before.

Among the long tests because it measures, which it cannot do next to others.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from engines.harness import eventually, new_id, new_key, prompt_of
from engines.mortal import TIMES

from kvpush.bench.soak_fleet import Fleet, Part, fleet
from kvpush.cli.ports import free_ports
from kvpush.core.ids import Address, EngineId, Target
from kvpush.core.params import receive_params, send_params
from kvpush.sim.orders import EngineConfig, Finished, Leave, Standing, Submit, Tell

pytestmark = [pytest.mark.engine, pytest.mark.long]

_IN_FLIGHT = 200
_STORM_S = 2.0
_LONG_ANSWER = 160
_RATE = 8
_MEASURED_S = 5
_RECOVERY_S = 10
_GOOD_S = 0.5
_END_S = 60.0


@pytest.fixture(scope="module")
def engines(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A prefill and a decode engine with room for the whole storm."""
    folder = tmp_path_factory.mktemp("engines")
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    whats = [
        EngineConfig(
            name=name,
            model=tiny,
            role=role,
            num_blocks=1700,
            max_num_seqs=256,
            extra={**TIMES, "port": port},
        )
        for (name, role), port in zip(roles.items(), free_ports(2), strict=True)
    ]
    with fleet(whats, folder) as started:
        started.wait_until_ready()
        yield started


def test_goodput_after_an_abort_storm_is_what_it_was_before(engines: Fleet) -> None:
    clients = _Clients(engines)
    clients.load(_MEASURED_S)  # whatever is slow only once
    before = clients.load(_MEASURED_S)

    staying = clients.storm()
    clients.load(_RECOVERY_S - _MEASURED_S)
    after = clients.load(_MEASURED_S)

    clients.hear_until_answered()
    assert clients.goodput(after) >= 0.95 * clients.goodput(before) > 0.9 * _RATE
    clients.assert_right([*before, *staying, *after])
    clients.assert_nothing_held()


@dataclass(eq=False)
class _Flight:
    """A request that was sent. `tokens` is its answer."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    sent_at: float
    ended_at: float = float("inf")
    tokens: tuple[int, ...] = ()


class _Clients:
    """All who ask; times are the monotonic clock in seconds."""

    def __init__(self, engines: Fleet) -> None:
        self._engines = engines
        self._prefill, self._decode = engines.parts
        self._open: dict[str, _Flight] = {}
        self._standings: dict[str, Standing] = {}
        self._sent = 0

    def load(self, seconds: float) -> list[_Flight]:
        """Normal load for so long; returns its requests, of which the last may not have been answered yet."""
        began = time.monotonic()
        flights = []
        for number in range(round(seconds * _RATE)):
            self._hear_until(began + number / _RATE)
            flights.append(self._send(max_tokens=8))
        self._hear_until(began + seconds)
        return flights

    def storm(self) -> list[_Flight]:
        """So many requests in flight, of which nine in ten are aborted at random moments; returns the others."""
        flights = [self._send(_LONG_ANSWER) for _ in range(_IN_FLIGHT)]
        chance = random.Random(_IN_FLIGHT)
        leaving = chance.sample(flights, _IN_FLIGHT * 9 // 10)
        began = time.monotonic()
        for flight, after_s in zip(leaving, sorted(chance.uniform(0, _STORM_S) for _ in leaving), strict=True):
            self._hear_until(began + after_s)
            assert flight.name in self._open, "it has been answered before its client could leave"
            self._leave(flight)
        return [flight for flight in flights if flight not in leaving]

    def goodput(self, flights: Sequence[_Flight]) -> float:
        """Answers per second that came in time."""
        good = sum(flight.ended_at - flight.sent_at <= _GOOD_S for flight in flights)
        return good * _RATE / len(flights)

    def assert_right(self, flights: Sequence[_Flight]) -> None:
        """I2: one engine alone gives the same answers."""
        alone = [self._submit(self._prefill, flight.prompt, flight.max_tokens) for flight in flights]
        self.hear_until_answered()
        assert [flight.tokens for flight in flights] == [reference.tokens for reference in alone], "I2: wrong text"

    def assert_nothing_held(self) -> None:
        """I1, and no engine has died."""
        eventually(lambda: all(self._is_idle(part) for part in self._engines.parts))
        assert not self._engines.died

    def hear_until_answered(self) -> None:
        """Wait for every answer that somebody still waits for."""
        deadline = time.monotonic() + _END_S
        while self._open:
            assert time.monotonic() < deadline, f"not answered: {list(self._open)}"
            self._hear_until(time.monotonic() + 0.1)

    def _send(self, max_tokens: int) -> _Flight:
        key = new_key()
        self._sent += 1
        prompt = prompt_of(90 + self._sent % 6, seed=self._sent)
        target = Target(Address("127.0.0.1", int(self._prefill.what.extra["port"])), EngineId(self._prefill.name))
        flight = self._submit(self._decode, prompt, max_tokens, receive_params(key, target))
        self._prefill.say(Submit(name=flight.name, prompt=prompt, max_tokens=1, params=send_params(key)))
        return flight

    def _submit(
        self, part: Part, prompt: tuple[int, ...], max_tokens: int, params: dict[str, object] | None = None
    ) -> _Flight:
        flight = _Flight(new_id(), prompt, max_tokens, time.monotonic())
        self._open[flight.name] = flight
        part.say(Submit(name=flight.name, prompt=prompt, max_tokens=max_tokens, params=params))
        return flight

    def _leave(self, flight: _Flight) -> None:
        del self._open[flight.name]
        for part in self._engines.parts:
            part.say(Leave(flight.name))

    def _hear_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            for heard in self._engines.hear(left):
                self._note(heard.engine, heard.report)

    def _note(self, part: Part, report: object) -> None:
        if isinstance(report, Standing):
            self._standings[part.name] = report
        if isinstance(report, Finished):
            self._note_end(report)

    def _note_end(self, report: Finished) -> None:
        flight = self._open.get(report.name)
        # a prefill leg has the name of its decode leg, and one token
        if flight is not None and len(report.tokens) == flight.max_tokens:
            flight.ended_at, flight.tokens = time.monotonic(), report.tokens
            del self._open[flight.name]

    def _is_idle(self, part: Part) -> bool:
        self._standings.pop(part.name, None)
        part.say(Tell())
        self._hear_until(time.monotonic() + 0.1)
        now, ready = self._standings.get(part.name), part.ready
        return bool(now and ready and not now.requests and now.free_blocks == ready.free_blocks)
