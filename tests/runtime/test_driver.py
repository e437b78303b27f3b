"""The loop of the transfer thread when something in it, or around it, is broken."""

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from runtime.rig import LOCAL, Party, pump_until, until
from runtime.side import BRISK, Side, announce, answer, final, new_key, push, receive, running

from kvpush.core.commands import Abort
from kvpush.core.endpoint import Endpoint
from kvpush.core.events import Counted, Outcome, ReceiveEnded, Stopped
from kvpush.core.ids import LinkId, OpId, PeerName
from kvpush.core.planner import Plan
from kvpush.runtime.control import ControlChannel
from kvpush.runtime.driver import Pace
from kvpush.transport.base import Transport, TransportEvent
from kvpush.transport.faults import Fault, FaultKind, Script
from kvpush.transport.faulty import FaultyTransport
from kvpush.transport.memory import MemoryFabric, MemoryTransport

TOKENS, HERE, THERE = 10, (3, 1, 4), (5, 9, 2)


@dataclass
class Bugs:
    """How often each call of a transport shall fail in a way that none should."""

    poll: int = 0
    post: int = 0
    add_peer: int = 0
    happened: list[str] = field(default_factory=list)

    def strike(self, call: str) -> None:
        left: int = getattr(self, call)
        if left:
            setattr(self, call, left - 1)
            self.happened.append(call)
            raise ValueError(f"a bug in {call}")


class BuggyTransport:
    """Passes everything on to a transport, unless a bug strikes."""

    def __init__(self, inner: MemoryTransport, bugs: Bugs) -> None:
        self._inner = inner
        self._bugs = bugs
        self.metadata = b""
        self.remove_peer = inner.remove_peer
        self.close = inner.close

    def register(self, *args: object) -> None:
        self._inner.register(*args)  # type: ignore[arg-type]
        self.metadata = self._inner.metadata

    def add_peer(self, peer: PeerName, metadata: bytes) -> None:
        self._bugs.strike("add_peer")
        self._inner.add_peer(peer, metadata)

    def post_write(self, op: OpId, peer: PeerName, plan: Plan, notice: bytes) -> None:
        self._bugs.strike("post")
        self._inner.post_write(op, peer, plan, notice)

    def post_read(self, op: OpId, peer: PeerName, plan: Plan) -> None:
        self._bugs.strike("post")
        self._inner.post_read(op, peer, plan)

    def poll(self) -> list[TransportEvent]:
        self._bugs.strike("poll")
        return self._inner.poll()


@pytest.fixture
def bugs() -> Bugs:
    """Those of the sender."""
    return Bugs()


@pytest.fixture
def sides(bugs: Bugs) -> Iterator[tuple[Side, Side]]:
    fabric = MemoryFabric()

    def buggy() -> Transport:
        return BuggyTransport(fabric.transport("prefill"), bugs)

    sender, receiver = Side("prefill", buggy), Side("decode", lambda: fabric.transport("decode"))
    sender.fill(seed=1)
    with running(sender, receiver):
        yield sender, receiver


def internal_errors(side: Side) -> int:
    return sum(isinstance(event, Counted) and event.name == "step_failed" for event in side.drain())


def test_push_arrives_in_spite_of_failing_polls(sides: tuple[Side, Side], bugs: Bugs) -> None:
    bugs.poll = 5
    assert push(*sides, TOKENS, HERE, THERE).outcome is Outcome.DELIVERED
    assert bugs.happened == ["poll"] * 5
    assert internal_errors(sides[0]) == 5


@pytest.mark.parametrize("call", ["post", "add_peer"])
def test_bug_in_the_transport_fails_one_transfer_and_not_the_next(
    sides: tuple[Side, Side], bugs: Bugs, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(bugs, call, 1)
    with caplog.at_level(logging.ERROR, "kvpush.transfer"):
        ended = push(*sides, TOKENS, HERE, THERE)
    assert ended.outcome is Outcome.FAILED
    assert f"a bug in {call}" in caplog.text
    assert "Traceback" in caplog.text
    assert push(*sides, TOKENS, HERE, THERE).outcome is Outcome.DELIVERED


def test_thread_goes_on_when_every_step_of_a_turn_is_broken(
    sides: tuple[Side, Side], bugs: Bugs, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = sides
    bugs.poll = 10**9
    key = new_key()
    with caplog.at_level(logging.ERROR, "kvpush.transfer"):
        receiver.submit(receive(key, sender.address, TOKENS, THERE))
        sender.submit(announce(key))
        before = until(lambda: len(bugs.happened) > 20 and sender.turns())
        until(lambda: sender.turns() > before + 20)
    assert sender.thread.alive
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) < 20
    bugs.poll = 0
    sender.submit(final(key, TOKENS, HERE))
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.DELIVERED


def test_command_that_is_none_costs_nothing_but_itself(sides: tuple[Side, Side]) -> None:
    sides[0].submit("nonsense", None)  # type: ignore[arg-type]
    assert push(*sides, TOKENS, HERE, THERE).outcome is Outcome.DELIVERED


def test_command_that_breaks_the_rules_is_refused_without_being_called_a_bug(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = sides
    key = new_key()
    with caplog.at_level(logging.WARNING, "kvpush.transfer"):
        receiver.submit(*[receive(key, sender.address, TOKENS, THERE)] * 2)
        until(lambda: "Receive is not possible" in caplog.text)
    assert "Traceback" not in caplog.text
    assert internal_errors(receiver) == 0


def test_random_frames_do_not_disturb_a_push(sides: tuple[Side, Side]) -> None:
    rng = random.Random(7)
    client = Party(ControlChannel(LOCAL))
    client.channel.open_link(LinkId(1), sides[0].address)
    for _ in range(2000):
        client.channel.send(LinkId(1), rng.randbytes(rng.choice([0, 1, 5, 50, 5000])))
        client.pump()
    pump_until(lambda: client.lost, client)
    assert push(*sides, TOKENS, HERE, THERE).outcome is Outcome.DELIVERED
    client.channel.close()


def test_many_commands_at_once_are_all_carried_out(sides: tuple[Side, Side]) -> None:
    sides[0].submit(*[Abort(new_key()) for _ in range(5000)])
    assert push(*sides, TOKENS, HERE, THERE).outcome is Outcome.DELIVERED


@pytest.fixture
def stuck() -> list[FaultyTransport]:
    """The transport whose writes never end, once it is made."""
    return []


@pytest.fixture
def stuck_sender(stuck: list[FaultyTransport]) -> Iterator[tuple[Side, Side]]:
    """Its owner, and a receiver."""
    fabric = MemoryFabric()

    def faulty() -> Transport:
        stuck.append(FaultyTransport(fabric.transport("prefill"), Script(Fault(FaultKind.WRITE_STUCK, nth=None))))
        return stuck[0]

    sender = Side("prefill", faulty)
    receiver = Side("decode", lambda: fabric.transport("decode"))
    with running(sender, receiver):
        yield sender, receiver


def test_stop_is_bounded_while_a_write_is_in_flight(
    stuck_sender: tuple[Side, Side], stuck: list[FaultyTransport]
) -> None:
    sender, receiver = stuck_sender
    key = new_key()
    receiver.submit(receive(key, sender.address, TOKENS, THERE))
    sender.submit(final(key, TOKENS, HERE))
    until(lambda: stuck[0].injected)
    began = time.monotonic()
    sender.stop()
    assert time.monotonic() - began < BRISK.stop_s + 2
    assert not sender.thread.alive
    assert any(isinstance(event, Stopped) for event in sender.events)
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.FAILED


def test_stop_gives_up_on_an_endpoint_that_never_reports_stopped(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Endpoint, "_finish_stop", lambda *_: None)
    sides[0].stop()
    assert not sides[0].thread.alive
    assert "abandoned" in caplog.text


def make_pace(last_happened: float) -> Pace:
    pace = Pace(fastest_s=0.0001)
    pace.happened(last_happened)
    return pace


@pytest.mark.parametrize(
    ("waited_s", "wait_s"), [(0.0, 0.0001), (0.0016, 0.0001), (0.008, 0.0005), (0.016, 0.001), (100.0, 0.001)]
)
def test_wait_between_polls_grows_with_the_time_that_nothing_has_happened(waited_s: float, wait_s: float) -> None:
    assert make_pace(50.0).wait_s(50.0 + waited_s) == pytest.approx(wait_s)


def test_rare_polls_go_on_for_a_while_after_the_last_thing_that_happened() -> None:
    pace = make_pace(50.0)
    assert pace.glows(50.9)
    assert not pace.glows(51.1)
    assert not Pace(0.0001).glows(0.0)
