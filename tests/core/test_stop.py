"""Stopping ends every transfer by a word, within a bound, and takes nothing new."""

import pytest
from core.process import Process
from core.world import World

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome


def test_stopping_sender_tells_every_receiver_at_once(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    waiting, held, announced = world.keys(3)
    d.receive(waiting, p, 8)
    p.announce(waiting)
    p.final(held, 8)
    p.announce(announced)
    world.run(0.1)
    p.stop()
    assert p.stopped == 1
    assert not p.sources
    world.settle(within=0.1)
    assert d.received[waiting].reason is Reason.SHUTDOWN


def test_stopping_sender_waits_for_what_it_has_posted(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 8)
    p.final(key, 8)
    world.run(0.1)
    p.stop()
    world.run(1.0)
    assert (p.stopped, key in p.sources, key in d.received) == (0, True, False)
    world.data.land(world.data.in_flight[0])
    world.settle(within=0.1)
    assert p.stopped == 1


def test_stopping_receiver_cancels_and_waits_for_the_answers(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    keys = world.keys(3)
    d.expect(keys[0], p)
    d.receive(keys[1], p, 8)
    world.run(0.1)
    d.receive(keys[2], p, 8)
    d.stop()
    assert d.stopped == 0
    world.run_until(lambda: d.stopped, within=0.1)
    assert {d.received[key].reason for key in keys[1:]} == {Reason.SHUTDOWN}
    for key in keys:
        p.final(key, 8)
    world.settle()


@pytest.mark.parametrize("who", ["p", "d"])
def test_stop_is_over_within_its_bound_when_the_peer_is_silent(
    world: World, pair: tuple[Process, Process], who: str
) -> None:
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 8)
    p.final(key, 8)
    world.run(0.1)
    world.network.part(p, d)
    stopping = p if who == "p" else d
    stopping.stop()
    took = world.run_until(lambda: stopping.stopped)
    assert took == pytest.approx(world.config.stop_s)
    world.run(1.0)
    assert stopping.stopped == 1
    world.network.heal()
    world.data.land(world.data.in_flight[0])
    world.settle()


def test_stop_of_the_idle_is_over_at_once(world: World, pair: tuple[Process, Process]) -> None:
    p, _ = pair
    p.stop()
    p.stop()
    assert p.stopped == 1


def test_commands_after_a_stop_are_answered_and_begin_nothing(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key, other = world.keys(2)
    p.stop()
    d.stop()
    d.expect(other, p)
    d.receive(key, p, 8)
    assert (d.received[key].outcome, d.received[key].reason) == (Outcome.FAILED, Reason.SHUTDOWN)
    p.announce(key)
    p.final(key, 8)
    p.withdraw(other)
    assert p.endpoint.transfers == d.endpoint.transfers == 0
    world.settle()


def test_receiver_that_asks_a_stopping_sender_is_told(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    held, late = world.keys(2)
    world.data.holding = lambda _: True
    d.receive(held, p, 8)
    p.final(held, 8)
    world.run(0.1)
    p.stop()
    d.receive(late, p, 8)
    world.run(0.1)
    assert d.received[late].reason is Reason.SHUTDOWN
    world.data.land(world.data.in_flight[0])
    world.settle(within=1.0)


def test_stopping_receiver_answers_every_request_when_its_time_is_over(
    world: World, pair: tuple[Process, Process]
) -> None:
    """A sender that does not answer must not leave requests without an end."""
    p, d = pair
    key = world.key()
    d.receive(key, p, 8)
    p.announce(key)
    world.run(0.1)
    p.hang()
    d.stop()
    world.run_until(lambda: d.stopped, within=world.config.stop_s + 0.1)
    assert d.received[key].quarantined
    assert d.received[key].reason is Reason.SHUTDOWN
