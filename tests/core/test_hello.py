"""How often a receiver says hello to a sender that does not answer, and what it does when it has stood still itself."""

import itertools

import pytest
from core.network import LOST, Fate
from core.process import Process
from core.world import World

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason
from kvpush.core.messages import Hello, Message


def test_hello_that_is_not_answered_is_repeated_ever_less_often() -> None:
    world = World()
    p, d = world.pair()
    said: list[float] = []

    def lose_hellos(_source: Process, _destination: Process, message: Message) -> Fate | None:
        if isinstance(message, Hello):
            said.append(world.now)
            return LOST
        return None

    world.judge(lose_hellos)
    key = world.key()
    d.receive(key, p, 8)
    world.run_until(lambda: key in d.received, within=6.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(said)]
    assert pauses[0] == pytest.approx(world.config.retry_s, abs=0.01)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(world.config.heartbeat_s, abs=0.01)


def test_receiver_that_wakes_after_its_lease_asks_before_it_gives_up() -> None:
    """Its time is over, and so is the lease, but a process that it can still ask is there."""
    world = World(ProtocolConfig(transfer_s=20.0))
    p, d = world.pair()
    key = world.key()
    p.announce(key)
    d.receive(key, p, 8)
    world.run(10.0)
    d.hang()
    world.run(1.0)
    world.network.cut(p)
    world.run(2 * world.config.lease_s)
    d.resume()
    world.run_until(lambda: key in d.received)
    assert d.received[key].reason is Reason.DEADLINE
    assert not d.received[key].quarantined
    p.withdraw(key)
    world.settle()
