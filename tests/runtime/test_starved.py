"""Transfer threads that do not get the CPU when they want it, in virtual time: late is not lost."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvpush.bench.faults.node import Ending, Policy, Request
from kvpush.bench.faults.world import World
from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason
from kvpush.core.ids import Address, EngineId, LinkId, Target

TIMES = ProtocolConfig()
SELDOM_S = TIMES.connect_timeout_s + 1.0
"""A thread that runs no more often finds the time for an answer over whenever it runs."""


@pytest.fixture
def world() -> Iterator[World]:
    with closing(World(Policy.FAIL, times=TIMES)) as world:
        yield world


def run_until_ended(world: World, request: Request, within_s: float = 20 * SELDOM_S) -> float:
    return world.run_until(lambda: request.ending is not Ending.NOTHING, within_s, "an end")


def serve(world: World) -> None:
    """One request gets its text from the sender's prompt."""
    request = world.begin(world.new_key())
    run_until_ended(world, request)
    assert request.was_delivered, request.reason
    assert world.d.finish(request)


def test_receiver_that_seldom_runs_uses_the_answer_that_waits_in_its_socket(world: World) -> None:
    world.d.pause_s = SELDOM_S
    for _ in range(5):
        serve(world)
        world.run(1.0)


@pytest.mark.parametrize("phase_s", [0.1 + SELDOM_S * eighth / 8 for eighth in range(8)])
def test_two_that_seldom_run_find_each_other_whenever_each_of_them_runs(world: World, phase_s: float) -> None:
    """The first hello leaves `phase_s` after the sender has run."""
    world.p.pause_s = 1.1 * SELDOM_S
    world.after(phase_s + 0.0005, lambda: setattr(world.d, "pause_s", SELDOM_S))
    world.run(phase_s)
    for _ in range(3):
        serve(world)


def test_hello_that_leaves_late_is_waited_for_as_long_as_one_that_does_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread stands still in the middle of a turn, after the time for an answer has begun."""
    open_link = world.d.channel.open_link

    def stand_still(link: LinkId, address: Address) -> None:
        world.now += SELDOM_S
        open_link(link, address)

    monkeypatch.setattr(world.d.channel, "open_link", stand_still)
    serve(world)


def test_answer_is_used_that_comes_while_the_receiver_stands_still(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading its sockets and judging its peers."""
    send = world.d.channel.send

    def stand_still(link: LinkId, frame: bytes) -> None:
        send(link, frame)
        world.now += SELDOM_S
        monkeypatch.setattr(world.d.channel, "send", send)

    monkeypatch.setattr(world.d.channel, "send", stand_still)
    serve(world)


def test_sender_that_is_nowhere_is_given_up_by_a_receiver_that_seldom_runs(world: World) -> None:
    """R4: no more is given back than was lost. Between two runs it listens until its next hello is due."""
    world.d.pause_s = SELDOM_S
    nowhere = Target(Address("10.9.9.9", 1), EngineId("nobody"))
    request = world.d.receive(world.new_key(), 16, nowhere)
    took_s = run_until_ended(world, request)
    assert request.reason is Reason.PEER_HANDSHAKE
    assert took_s <= 5 * SELDOM_S


def test_receiver_that_runs_in_time_gives_nothing_back(world: World) -> None:
    nowhere = Target(Address("10.9.9.9", 1), EngineId("nobody"))
    request = world.d.receive(world.new_key(), 16, nowhere)
    assert run_until_ended(world, request) == pytest.approx(TIMES.connect_timeout_s, abs=0.01)
