"""Prompts that are written while they are computed: chunk by chunk, layer by layer, and again after a preemption."""

import pytest
from core.memory import make_layout
from core.process import Process
from core.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.core.events import Outcome
from kvpush.core.messages import decode_notice

LAYERS = 6


def deep_pair(world: World) -> tuple[Process, Process]:
    """A sender and a receiver with several layers, and blocks of unequal sizes."""
    return world.start("p", make_layout(0, 4, layers=LAYERS)), world.start("d", make_layout(1, 8, layers=LAYERS))


def parts_of(world: World) -> list[int]:
    """The number of parts that each notice names, in the order of posting."""
    return [decode_notice(write.notice).parts for write in world.data.writes]


def test_layers_are_written_as_they_become_final(world: World) -> None:
    p, d = deep_pair(world)
    key = world.key()
    d.receive(key, p, 21)
    world.run(0.1)
    for layers in (2, 5):
        p.final(key, 21, last=False, layers=layers)
        world.run(0.1)
    p.final(key, 21)
    world.settle(within=0.2)

    assert d.received[key].outcome is Outcome.DELIVERED
    assert parts_of(world) == [0, 0, 3]
    moved = sum(write.post.plan.total_bytes for write in world.data.writes)
    assert moved == 21 * LAYERS * 2 * 4, "nothing is written twice"


def test_layers_ahead_wait_for_more_where_the_pair_is_fast(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first transfer shows that the pair moves 1,008 bytes in 10 ms, so what takes 5 ms is 504 bytes."""
    monkeypatch.setattr("kvpush.core.inbound.MEASURED_BYTES", 1)
    monkeypatch.setattr("kvpush.core.chunks.LEAST_WIRE_S", 0.005)
    p, d = deep_pair(world)
    first, key = world.key(), world.key()
    d.receive(first, p, 21)
    p.final(first, 21)
    world.settle(within=0.2)

    d.receive(key, p, 21)
    world.run(0.1)
    for layers in (1, 2, 3, 5):  # 168 bytes each, of which the first two are too few, and so are the last two
        p.final(key, 21, last=False, layers=layers)
        world.run(0.1)
    p.final(key, 21)
    world.settle(within=0.2)

    assert d.received[key].outcome is Outcome.DELIVERED
    written = [write.post.plan.total_bytes for write in world.data.writes if write.key == key]
    assert written == [3 * 168, 3 * 168], "and nothing is written twice"
    assert p.counts("layers_held") == 3


def test_layers_ahead_are_written_while_nobody_knows_how_fast_the_pair_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpush.core.chunks.LEAST_WIRE_S", 1e9)
    p, d = deep_pair(world)
    key = world.key()
    d.receive(key, p, 21)
    world.run(0.1)
    p.final(key, 21, last=False, layers=1)
    world.run(0.1)

    assert [write.post.plan.total_bytes for write in world.data.writes] == [168]


def test_receiver_that_registers_between_layers_gets_what_is_there_at_once(world: World) -> None:
    p, d = deep_pair(world)
    key = world.key()
    p.final(key, 16, last=False)
    p.final(key, 24, last=False, layers=3)
    d.receive(key, p, 24)
    world.run(0.1)
    assert sum(write.post.plan.total_bytes for write in world.data.writes) == (16 * LAYERS + 8 * 3) * 2 * 4

    p.final(key, 24)
    world.settle(within=0.2)
    assert d.received[key].outcome is Outcome.DELIVERED


@settings(deadline=None)
@given(
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, LAYERS - 1), max_size=3),
    start=st.integers(0, 30),
    registered_at=st.integers(0, 20),
)
def test_prompt_arrives_however_it_is_cut(chunks: list[int], cuts: list[int], start: int, registered_at: int) -> None:
    world = World()
    p, d = deep_pair(world)
    key, total = world.key(), sum(chunks)
    steps = [(sum(chunks[: i + 1]), layers) for i in range(len(chunks)) for layers in (*sorted(set(cuts)), None)]
    for number, (tokens, layers) in enumerate(steps):
        if number == registered_at:
            d.receive(key, p, total, min(start, total - 1))
        p.final(key, tokens, tokens == total and layers is None, layers)
        world.run(0.02)
    if registered_at >= len(steps):
        d.receive(key, p, total, min(start, total - 1))
    world.settle(within=0.5)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_large_write_is_posted_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpush.core.chunks.POST_BYTES", 400)
    p, d = deep_pair(world)
    key = world.key()
    d.receive(key, p, 21)
    p.final(key, 21)
    world.settle(within=0.2)

    assert d.received[key].outcome is Outcome.DELIVERED
    assert [write.post.plan.total_bytes for write in world.data.writes] == [336, 336, 336]
    assert parts_of(world) == [0, 0, 3]


# not pinned, not complete -------------------------------------------------------------------------------
def test_receiver_is_not_told_of_a_whole_prompt_before_its_blocks_are_pinned(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    world.run(0.1)
    p.final(key, 10, last=False)
    world.run(1.0)
    assert key not in d.received
    p.final(key, 10)
    world.settle(within=0.2)

    assert d.received[key].outcome is Outcome.DELIVERED
    assert [write.post.plan.descriptors > 0 for write in world.data.writes] == [True, False]


# preemption ---------------------------------------------------------------------------------------------
def test_preempted_prompt_is_written_again_after_writes_that_may_be_torn_have_stopped(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 12)
    world.run(0.1)
    world.data.holding = lambda _: True
    p.final(key, 8, last=False)
    world.run(0.1)
    p.preempt(key)
    p.final(key, 12)
    world.run(0.1)
    torn = world.data.writes[:]
    assert len(torn) == 1, "nothing is posted beside a write that may be torn"

    world.data.holding = lambda _: False
    world.data.land(torn[0])
    world.settle(within=0.2)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_preempted_prompt_is_written_again_where_its_writes_had_landed(world: World) -> None:
    """The transfer thread learns of a preemption late: what it wrote just before may have been overwritten by then."""
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 12)
    world.run(0.1)
    p.final(key, 8, last=False)
    world.run(0.1)
    p.preempt(key)
    p.final(key, 4, last=False)
    world.run(0.1)
    p.final(key, 12)
    world.settle(within=0.2)

    assert d.received[key].outcome is Outcome.DELIVERED
    assert p.records[-1].nbytes == (8 + 12) * 2 * 4
    assert p.counts("retracted") == 1


def test_prompt_preempted_before_anyone_registered_is_delivered(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    p.announce(key)
    p.final(key, 8, last=False)
    p.preempt(key)
    d.receive(key, p, 12)
    world.run(0.1)
    assert not world.data.writes
    p.final(key, 12)
    world.settle(within=0.2)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_complete_prompt_cannot_be_retracted(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    p.final(key, 12)
    held, p.sources[key] = p.sources[key], ((),)
    p.preempt(key)
    p.sources[key] = held
    d.receive(key, p, 12)
    world.settle(within=0.2)

    assert d.received[key].outcome is Outcome.DELIVERED
    assert p.counts("local_error") == 1


def test_withdrawn_prompt_frees_its_blocks_when_its_writes_have_stopped(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 12)
    world.run(0.1)
    world.data.holding = lambda _: True
    p.final(key, 8, last=False)
    p.withdraw(key)
    world.run(0.5)
    assert key in p.sources
    assert key not in d.received

    world.data.land(world.data.writes[0])
    world.settle(within=0.2)
    assert key not in p.sources
    assert d.received[key].outcome is Outcome.FAILED
