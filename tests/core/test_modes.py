"""Which mode a pair agrees on, and what becomes of those that cannot; one peer that is used both ways."""

import pytest
from core.process import Process
from core.world import CONFIG, World

from kvpush.core.errors import Reason
from kvpush.core.events import ModeChosen, Outcome
from kvpush.core.mode import MEASURED_BYTES, SAMPLES, Mode, ModeSetting


@pytest.fixture
def world() -> World:
    return World(mode=ModeSetting.PULL)


def ended(d: Process) -> tuple[Outcome, Reason]:
    """How the only transfer ended at the receiver."""
    (event,) = d.received.values()
    return event.outcome, event.reason


def test_pair_that_cannot_agree_is_refused_with_both_modes_named() -> None:
    world = World()
    p, d = world.start("p", mode=ModeSetting.PUSH), world.start("d", mode=ModeSetting.PULL)
    key = world.key()
    d.receive(key, p, 10)
    world.settle()
    assert ended(d) == (Outcome.FAILED, Reason.INCOMPATIBLE)
    assert "mode: the sender can push, the receiver pull." in d.received[key].detail


def test_request_may_ask_for_a_mode_that_both_can() -> None:
    world = World(mode=ModeSetting.AUTO)
    p, d = world.pair()
    for mode in Mode:
        key = world.key()
        d.receive(key, p, 10, mode=mode)
        p.final(key, 10)
        world.settle()
        assert d.received[key].outcome is Outcome.DELIVERED
    assert [record.mode for record in d.records] == [Mode.PUSH, Mode.PULL]


def test_request_that_asks_for_a_mode_the_pair_cannot_is_told_so(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10, mode=Mode.PUSH)
    p.final(key, 10)
    world.settle()
    assert ended(d) == (Outcome.FAILED, Reason.INCOMPATIBLE)
    assert "this pair can pull, the request asks for push" in d.received[key].detail
    assert key not in p.sources


def test_sender_whose_memory_cannot_be_loaded_is_pushed_from_where_that_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpush.core.mode.MEASURED_BYTES", 1)
    world = World(mode=ModeSetting.AUTO)
    p, d = world.pair()
    world.data.peer_error = lambda source, _: "no way" if source is d else ""
    wanted, *auto = world.keys(3)
    for key, mode in ((wanted, Mode.PULL), (auto[0], None), (auto[1], None)):
        d.receive(key, p, 10, mode=mode)
        p.final(key, 10)
        world.settle()
    assert d.received[wanted].reason is Reason.PEER_HANDSHAKE
    assert "the sender's memory cannot be loaded: no way" in d.received[wanted].detail
    assert wanted not in p.sources
    # of the others the second would have been the one to measure pull with
    assert [d.received[key].outcome for key in auto] == [Outcome.DELIVERED] * 2


def test_engines_that_read_from_each_other_load_one_another_once(world: World) -> None:
    one, other = world.pair()
    there, back = world.keys(2)
    one.receive(there, other, 10)
    other.receive(back, one, 10)
    one.final(back, 10)
    other.final(there, 10)
    world.settle()
    assert {process.received[key].outcome for process, key in ((one, there), (other, back))} == {Outcome.DELIVERED}


def test_way_that_is_closed_for_a_stuck_write_is_opened_again_for_reading() -> None:
    """`other` gives up a write to `one`, from which it also reads."""
    world = World(mode=ModeSetting.AUTO)
    one, other = world.pair()
    stuck, read = world.keys(2)
    world.data.holding = lambda write: write.poster is other
    one.receive(stuck, other, 10, mode=Mode.PUSH)
    other.final(stuck, 10)
    other.receive(read, one, 10, mode=Mode.PULL)
    one.final(read, 10)
    world.run_until(lambda: len(world.data.in_flight) == 2)
    one.abort(stuck)
    world.run_until(lambda: read in other.received, within=2 * CONFIG.drain_s)
    assert other.received[read].quarantined  # its reads were given up, too
    world.data.holding = lambda _: False
    again = world.key()
    other.receive(again, one, 10, mode=Mode.PULL)
    one.final(again, 10)
    world.settle()
    assert other.received[again].outcome is Outcome.DELIVERED


def test_pair_that_can_do_both_measures_each_and_takes_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads take ten times as long as writes here, then the other way about."""
    monkeypatch.setattr("kvpush.core.mode.MEASURED_BYTES", 1)
    for slow, chosen in ((Mode.PULL, Mode.PUSH), (Mode.PUSH, Mode.PULL)):
        world = World(mode=ModeSetting.AUTO)
        p, d = world.pair()
        world.data.holding = lambda _: True
        for _ in range(2 * SAMPLES + 1):
            key = world.key()
            d.receive(key, p, 10)
            p.final(key, 10)
            world.run_until(lambda: world.data.in_flight)  # noqa: B023
            (operation,) = world.data.in_flight
            is_slow = (operation.poster is d) == (slow is Mode.PULL)
            world.run(1.0 if is_slow else 0.1)
            world.data.land(operation)
            world.settle()
        assert [record.mode for record in d.records] == [*SAMPLES * (Mode.PUSH, Mode.PULL), chosen]
        (choice,) = d.choices
        assert isinstance(choice, ModeChosen)
        assert choice.mode is chosen
        slower, faster = sorted((choice.push_rate, choice.pull_rate))
        assert 5 < faster / slower < 15


def test_small_transfers_are_pushed(world: World) -> None:
    world.mode = ModeSetting.AUTO
    p, d = world.pair()
    assert 10 * p.layout.token_bytes < MEASURED_BYTES
    for key in world.keys(3):
        d.receive(key, p, 10)
        p.final(key, 10)
    world.settle()
    assert {record.mode for record in d.records} == {Mode.PUSH}
