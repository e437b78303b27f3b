"""Requests that were turned away before their receiver asked for anything."""

from core.process import Process
from core.world import World

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome


def test_prompt_of_a_request_that_was_turned_away_is_dropped_at_its_sender(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    key = world.key()
    p.final(key, 10)
    d.disown(key, p)
    world.settle(within=0.1)
    assert p.records[-1].reason is Reason.ABORTED


def test_disowning_a_key_that_is_known_changes_nothing(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    d.receive(key, p, 10)
    d.disown(key, p)
    p.final(key, 10)
    world.settle(within=0.1)
    d.disown(key, p)
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.DELIVERED
    assert len(d.records) == 1
    assert not d.counts("local_error")
