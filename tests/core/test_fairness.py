"""Writes take turns by bytes: no transfer, and no receiver, waits for all that another one has to write."""

import pytest
from core.memory import make_layout
from core.process import Process
from core.world import CONFIG, World
from msgspec.structs import replace

from kvpush.core.events import Outcome
from kvpush.core.ids import Key
from kvpush.core.messages import decode_notice

LAYERS = 12
LARGE, SMALL = 40, 4
PIECE = 8 * LARGE
"""Bytes of one layer of a large prompt, and no less than a whole small one has."""
WINDOW = 3


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Writes of at most `PIECE` bytes, which all count the same, `WINDOW` of them under way to a receiver."""
    monkeypatch.setattr("kvpush.core.chunks.POST_BYTES", PIECE)
    monkeypatch.setattr("kvpush.core.inflight._LEAST_BYTES", PIECE)
    return World(replace(CONFIG, window_bytes=WINDOW * PIECE))


def posted(world: World) -> list[Key]:
    """Whose writes were posted, in order."""
    return [decode_notice(write.notice).key for write in world.data.writes]


def start(world: World, engine_id: str, number: int) -> Process:
    """A process whose model has as many layers as a large prompt has writes."""
    return world.start(engine_id, make_layout(number, 4, layers=LAYERS))


def hand_over(p: Process, d: Process, tokens: int) -> Key:
    """A prompt that is complete and wanted: `LARGE` tokens take `LAYERS` writes, `SMALL` ones one."""
    key = p.world.key()
    d.receive(key, p, tokens)
    p.world.run(0.01)
    p.final(key, tokens)
    return key


def test_small_transfer_waits_only_for_what_is_under_way(world: World) -> None:
    p, d = start(world, "p", 0), start(world, "d", 1)
    hand_over(p, d, SMALL)
    world.settle(within=1.0)
    before = len(world.data.writes)

    large = hand_over(p, d, LARGE)
    small = hand_over(p, d, SMALL)
    world.run_until(lambda: small in d.received)

    assert large not in d.received
    order = posted(world)[before:]
    assert order[:WINDOW] == [large] * WINDOW
    assert order.index(small) <= 2 * WINDOW
    world.settle(within=5.0)
    assert d.received[large].outcome is Outcome.DELIVERED


def test_large_transfers_take_turns(world: World) -> None:
    p, d = start(world, "p", 0), start(world, "d", 1)
    hand_over(p, d, SMALL)
    world.settle(within=1.0)
    before = len(world.data.writes)
    world.data.holding = lambda _: True
    first, second = hand_over(p, d, LARGE), hand_over(p, d, LARGE)
    assert len(world.data.in_flight) == WINDOW, "no more is under way at a time"
    while world.data.in_flight:
        world.data.land(world.data.in_flight[0])
        world.run(0.001)

    order = posted(world)[before:]
    shared = order[WINDOW : 2 * (LAYERS - WINDOW)]
    assert abs(shared.count(first) - shared.count(second)) <= WINDOW + 1
    world.settle(within=1.0)
    assert {d.received[key].outcome for key in (first, second)} == {Outcome.DELIVERED}


def test_receiver_whose_writes_do_not_move_holds_up_no_other(world: World) -> None:
    p, slow, d = start(world, "p", 0), start(world, "slow", 1), start(world, "d", 2)
    world.data.holding = lambda write: write.destination is slow
    stuck = hand_over(p, slow, LARGE)
    key = hand_over(p, d, LARGE)
    world.run_until(lambda: key in d.received)
    assert len(world.data.in_flight) == WINDOW
    assert stuck not in slow.received
    world.data.holding = lambda _: False
    for write in world.data.in_flight:
        world.data.land(write)
    world.settle(within=5.0)


def test_cancelled_transfer_writes_nothing_that_still_waited(world: World) -> None:
    p, d = start(world, "p", 0), start(world, "d", 1)
    world.data.holding = lambda _: True
    large = hand_over(p, d, LARGE)
    d.abort(large)
    world.run(0.1)
    assert large not in d.received, "what is under way may still land"
    for write in world.data.in_flight:
        world.data.land(write)
    world.settle(within=0.1)

    assert len(world.data.writes) == WINDOW
    world.data.holding = lambda _: False
    key = hand_over(p, d, LARGE)
    world.settle(within=5.0)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_lost_receiver_leaves_nothing_waiting(world: World) -> None:
    p, d = start(world, "p", 0), start(world, "d", 1)
    world.data.holding = lambda _: True
    hand_over(p, d, LARGE)
    d.kill()
    world.settle()
    assert p.endpoint.ops_in_flight == 0
    assert not p.endpoint._sender._in_flight._lanes
