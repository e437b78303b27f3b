"""How often a receiver says hello to a sender that does not answer."""

import itertools

import pytest
from core.network import LOST, Fate
from core.process import Process
from core.world import World

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
