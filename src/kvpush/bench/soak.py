"""A soak: mixed traffic between real engines, clients that leave, engines that are killed, every text verified.

Two prefill and two decode engines (one recomputes what did not come, the other fails the request) and one without a
connector, which says what is right. The soak plays the router's part: it sends both legs of a request at once, and says
where earlier turns are kept, whether or not they still are.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path

import msgspec

from kvpush.bench.soak_fleet import Fleet, Heard, Part, fleet
from kvpush.bench.soak_traffic import Clients, Mix, Wish
from kvpush.cli.parts import FIRST_TOKEN_SCHEDULER
from kvpush.cli.ports import free_ports
from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address, EngineId, Key, Target, TransferId
from kvpush.core.mode import ModeSetting
from kvpush.core.params import Reference, receive_params, send_params
from kvpush.sim.orders import EngineConfig, Finished, Leave, Standing, Submit, Tell

_HOST = "127.0.0.1"
_TURN_S = 0.05
_LOOK_S = 5.0
_SAY_S = 20.0
_LONGEST = 2048
_ROOM = 1120  # for what a client adds, and its answer
_TURNS = 64  # that are remembered
_SHORTEST = (3,)
_PROTOCOL = {
    "lease_s": 6.0,
    "heartbeat_s": 1.0,
    "peer_timeout_s": 6.0,
    "quarantine_s": 6.0,
    "unannounced_s": 6.0,
    "connect_timeout_s": 4.0,
    "keep_s": 20.0,
}


class FirstToken(Enum):
    """Who samples the first token of an answer."""

    PREFILL = auto()
    DECODE = auto()


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """`bound_s`: a request that takes longer is stuck. `settle_s`: blocks that are not free so long after the last
    request are leaked; longer than lease and quarantine together. `kill_s` counts from when all engines are up."""

    model: str
    logs: Path
    minutes: float
    kill_s: float = 60.0
    concurrency: int = 8
    bound_s: float = 120.0
    settle_s: float = 60.0
    blocks: int = 192
    seed: int = 1
    mode: ModeSetting = ModeSetting.PUSH
    first_token: FirstToken = FirstToken.DECODE
    mix: Mix = field(default_factory=Mix)

    def __post_init__(self) -> None:
        for name in ("minutes", "kill_s", "concurrency", "bound_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"{getattr(self, name)} is not greater than 0", "Set a positive number.")


class SoakReport(msgspec.Struct, kw_only=True):
    """What has become of the requests, and of the engines. `cut`: the decode engine was killed under the request;
    `reused_tokens`: prompt tokens that prefill engines did not compute, because a decode engine had kept them."""

    minutes: float = 0.0
    requests: int = 0
    right: int = 0
    aborted: int = 0
    failed: int = 0
    cut: int = 0
    recomputed: int = 0
    continued: int = 0
    reused_tokens: int = 0
    wrong: int = 0
    stuck: int = 0
    leaked_blocks: int = 0
    killed: int = 0
    died: list[str] = msgspec.field(default_factory=list)
    transfers: dict[str, int] = msgspec.field(default_factory=dict)
    events: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong, stuck or leaked, no engine died by itself, and anything was right at all."""
        return bool(self.right) and not (self.wrong or self.stuck or self.leaked_blocks or self.died)


@dataclass(frozen=True)
class _Turn:
    """What has been said, and where it is kept for a while."""

    tokens: tuple[int, ...]
    kept: Reference


@dataclass
class _Flight:
    """One request on its way. Its turn will be `kept`; `answer` and `reference` are what the decode and the plain
    engine have said."""

    wish: Wish
    decode: Part
    prefill: Part
    started_at: float
    kept: Reference
    answer: Finished | None = None
    reference: Finished | None = None


class _Soak:
    """Owned by one thread."""

    def __init__(self, options: SoakOptions, engines: Fleet, say: Callable[[str], None]) -> None:
        self._options = options
        self._fleet = engines
        self._say = say
        *pairs, self._plain = engines.parts
        self._prefills, self._decodes = pairs[:2], pairs[2:]
        self._victims = _in_turn(pairs)
        self._clients = Clients(options.mix, options.seed)
        self._flights: dict[str, _Flight] = {}
        self._turns: deque[_Turn] = deque(maxlen=_TURNS)
        self._standings: dict[tuple[str, int], Standing] = {}
        self._report = SoakReport()
        self._all_up_at = self._began = self._said = self._looked = time.monotonic()

    def run(self) -> SoakReport:
        """Traffic for so long, then silence, then the counts."""
        until = self._began + self._options.minutes * 60
        while time.monotonic() < until:
            self._send()
            self._turn()
            self._kill_when_due()
        self._say("traffic has ended; waiting for what is on its way")
        while self._flights:
            self._turn()
        self._settle()
        return self._finish()

    def _turn(self) -> None:
        for heard in self._fleet.hear(_TURN_S):
            self._hear(heard)
        now = time.monotonic()
        for name, flight in list(self._flights.items()):
            self._watch(name, flight, now)
        if now >= self._looked + _LOOK_S:
            self._look(now)
        if now >= self._said + _SAY_S:
            self._said = now
            self._say(f"{(now - self._began) / 60:5.1f} min  {_line(self._report)}")

    # requests -------------------------------------------------------------------------------------------
    def _send(self) -> None:
        while len(self._flights) < self._options.concurrency:
            wish = self._clients.wish()
            decode = self._pick([part for part in self._decodes if part.ready])
            senders = [part for part in self._prefills if part.ready or wish.may_go_astray]
            prefill = self._pick(senders)
            if decode is None or prefill is None:
                return
            self._report.requests += 1
            name = f"cmpl-{self._report.requests}-0"
            wish, reuse = self._continued(wish)
            flight = _Flight(wish, decode, prefill, time.monotonic(), Reference(_new_key(), _target(decode)))
            self._flights[name] = flight
            self._send_legs(name, flight, reuse)

    def _continued(self, wish: Wish) -> tuple[Wish, Reference | None]:
        """The wish with what has been said before it, if it is to go on from that."""
        turn = self._turns[self._clients.pick(len(self._turns))] if wish.continues and self._turns else None
        if turn is None:
            return wish, None
        self._report.continued += 1
        return replace(wish, prompt=turn.tokens + wish.prompt), turn.kept

    def _pick(self, parts: list[Part]) -> Part | None:
        return parts[self._clients.pick(len(parts))] if parts else None

    def _send_legs(self, name: str, flight: _Flight, reuse: Reference | None) -> None:
        wish, prefill, key = flight.wish, flight.prefill, _new_key()
        params = receive_params(key, _target(prefill), keep=flight.kept.key)
        flight.decode.say(Submit(name=name, prompt=wish.prompt, max_tokens=wish.max_tokens, params=params))
        if prefill.ready and wish.sends_prefill:
            prefill.say(Submit(name=name, prompt=wish.prompt, max_tokens=1, params=send_params(key, reuse)))
        self._plain.say(Submit(name=name, prompt=wish.prompt, max_tokens=wish.max_tokens))

    def _hear(self, heard: Heard) -> None:
        report = heard.report
        if isinstance(report, Standing):
            self._standings[heard.engine.name, heard.engine.life] = report
        elif isinstance(report, Finished):
            self._note(report, heard.engine)

    def _note(self, report: Finished, engine: Part) -> None:
        flight = self._flights.get(report.name)
        if flight is not None and engine is flight.decode:
            flight.answer = report
        elif flight is not None and engine is self._plain:
            flight.reference = report

    def _watch(self, name: str, flight: _Flight, now: float) -> None:
        leaves = flight.wish.leaves_after_s
        if flight.answer and flight.reference:
            self._judge(flight, flight.answer, flight.reference)
        elif flight.answer is None and leaves is not None and now >= flight.started_at + leaves:
            self._report.aborted += 1
            self._leave(name, flight)
        elif now >= flight.started_at + self._options.bound_s:
            self._report.stuck += 1
            self._say(f"{name} from {flight.prefill.name} to {flight.decode.name} does not end")
            self._leave(name, flight)
        else:
            return
        del self._flights[name]

    def _judge(self, flight: _Flight, answer: Finished, reference: Finished) -> None:
        if answer.reason == "error":
            self._report.failed += 1
        elif answer.tokens != reference.tokens:
            self._report.wrong += 1
            self._say(f"WRONG: {answer} is not {reference}; prompt {flight.wish.prompt}")
        else:
            self._report.right += 1
            self._report.recomputed += answer.cached < len(flight.wish.prompt) - 1
            self._remember(flight.wish.prompt + answer.tokens, flight.kept)

    def _remember(self, said: tuple[int, ...], kept: Reference) -> None:
        if len(said) + _ROOM <= _LONGEST:
            self._turns.append(_Turn(said, kept))

    def _leave(self, name: str, flight: _Flight) -> None:
        for part in (flight.decode, flight.prefill):
            if part.ready:
                part.say(Leave(name))

    # engines --------------------------------------------------------------------------------------------
    def _kill_when_due(self) -> None:
        now = time.monotonic()
        if not all(part.ready for part in self._fleet.parts):
            self._all_up_at = now
        elif now >= self._all_up_at + self._options.kill_s:
            self._kill(next(self._victims))

    def _kill(self, victim: Part) -> None:
        self._say(f"killing {victim.name}")
        for heard in self._fleet.hear(0.0):  # what it has said before its death counts
            self._hear(heard)
        victim.kill()
        self._report.killed += 1
        for name, flight in list(self._flights.items()):
            if flight.decode is victim:
                self._report.cut += 1
                del self._flights[name]
        victim.start()

    def _look(self, now: float) -> None:
        self._looked = now
        for part in self._fleet.parts:
            if part.ready:
                part.say(Tell())

    def _settle(self) -> None:
        """Wait until every block is free again. Blocks that were kept for a next turn go with an engine's next step."""
        self._fleet.wait_for_the_living()  # those that died by themselves are counted, and must not end the count
        deadline = time.monotonic() + self._options.settle_s
        while True:
            self._look(time.monotonic())
            self._wake()
            for _ in range(20):
                for heard in self._fleet.hear(_TURN_S):
                    self._hear(heard)
            if not self._held() or time.monotonic() >= deadline:
                self._report.leaked_blocks = self._held()
                return

    def _wake(self) -> None:
        for part in self._fleet.parts:
            if part.ready:
                part.say(Submit(name=f"wake-{time.monotonic_ns()}", prompt=_SHORTEST, max_tokens=1))

    def _held(self) -> int:
        held = 0
        for part in self._fleet.parts:
            now = self._standings.get((part.name, part.life))
            if part.ready is not None and now is not None:
                held += part.ready.free_blocks - now.free_blocks
        return held

    def _finish(self) -> SoakReport:
        report = self._report
        report.minutes = (time.monotonic() - self._began) / 60
        report.died = self._fleet.died
        transfers: Counter[str] = Counter()
        events: Counter[str] = Counter()
        for standing in self._standings.values():
            transfers.update({" ".join(how): number for how, number in standing.counters.transfers.items()})
            events.update({" ".join(what): number for what, number in standing.counters.counted.items()})
            report.reused_tokens += sum(volume.reused for volume in standing.counters.volumes.values())
        report.transfers, report.events = dict(sorted(transfers.items())), dict(sorted(events.items()))
        return report


def _new_key() -> Key:
    return Key(TransferId(os.urandom(16).hex()))


def _target(part: Part) -> Target:
    return Target(Address(_HOST, int(part.what.extra["port"])), EngineId(part.name))


def _in_turn(parts: list[Part]) -> Iterator[Part]:
    """A prefill engine, a decode engine, the other prefill engine, and so on."""
    while True:
        yield from (parts[0], parts[2], parts[1], parts[3])


def _line(report: SoakReport) -> str:
    names = ("requests", "right", "aborted", "failed", "cut", "recomputed", "continued", "wrong", "stuck", "killed")
    return ", ".join(f"{name} {getattr(report, name)}" for name in names)


def _engines(options: SoakOptions) -> list[EngineConfig]:
    first_tokens = FIRST_TOKEN_SCHEDULER if options.first_token is FirstToken.PREFILL else None

    def one(
        name: str, role: str, policy: str = "recompute", port: int = 0, scheduler: str | None = None
    ) -> EngineConfig:
        return EngineConfig(
            name=name,
            model=options.model,
            role=role,
            failure_policy=policy,
            num_blocks=options.blocks,
            max_model_len=_LONGEST,
            max_num_batched_tokens=_LONGEST,
            max_num_seqs=16,
            scheduler_cls=scheduler,
            extra={**_PROTOCOL, "port": port, "mode": options.mode.value},
        )

    ports = free_ports(4)
    return [
        one("prefill-0", "kv_both", port=ports[0]),
        one("prefill-1", "kv_both", port=ports[1]),
        one("decode-recompute", "kv_both", "recompute", ports[2], first_tokens),
        one("decode-fail", "kv_both", "fail", ports[3], first_tokens),
        one("plain", ""),
    ]


def soak(options: SoakOptions, say: Callable[[str], None]) -> SoakReport:
    """Run a soak; `say` gets a line of progress now and then. Raises `EngineLost` when an engine does not come up."""
    options.logs.mkdir(parents=True, exist_ok=True)
    say(f"starting five engines; logs: {options.logs}")
    with fleet(_engines(options), options.logs) as engines:
        engines.wait_until_ready()
        say("all are up")
        report = _Soak(options, engines, say).run()
        for part in engines.parts:
            part.stop()
    return report
