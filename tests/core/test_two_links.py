"""A receiver that has several connections to a sender, one for each name that it knows it by: R7."""

import pytest
from core.network import LOST
from core.process import Process
from core.world import World

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.ids import EngineId, Target
from kvpush.core.messages import Heartbeat


@pytest.mark.parametrize("other", [EngineId("before"), None], ids=["stale id", "no id"])
def test_end_of_one_of_two_links_raises_no_doubt_of_the_peer(
    world: World, pair: tuple[Process, Process], other: EngineId | None
) -> None:
    """B34: a router that still has the id of the sender's earlier life, and one that has the right one. What is under
    way goes on, even when not a word comes over the other link until a beat is due."""
    p, d = pair
    key, lost = world.keys(2)
    world.data.holding = lambda write: write.key == key
    d.receive(key, p, 8)
    p.final(key, 8)
    world.run(0.1)
    d.receive(lost, Target(p.address, other), 8)
    world.run(0.1)
    session = d.endpoint._outbound.get(Target(p.address, other))
    if session is not None:
        world.network.close(d, session.link)
    world.judge(lambda source, _to, message: LOST if source is d and isinstance(message, Heartbeat) else None)
    world.run(world.config.doubt_s + 0.5)
    assert p.counts("peer_lost") == 0
    world.network.judges.clear()
    world.data.land(world.data.in_flight[0])
    world.run_until(lambda: key in d.received, 0.5)
    assert d.received[key].outcome is Outcome.DELIVERED
    if other is not None:
        assert d.received[lost].reason is Reason.WRONG_ENGINE


def test_peer_whose_links_have_all_ended_is_lost(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    keys = world.keys(2)
    for key, known_as in zip(keys, (EngineId("p"), None), strict=True):
        d.receive(key, Target(p.address, known_as), 6)
    world.run(1.0)
    d.kill()
    world.run(world.config.doubt_s + 0.1)
    assert p.counts("peer_lost") == 1
    assert not p.peers
