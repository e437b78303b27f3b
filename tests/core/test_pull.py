"""Pull: the sender offers, the receiver reads, and believes it only when the sender confirms."""

import re

import pytest
from core.faults import first, listen, lose
from core.memory import make_layout
from core.network import Fate
from core.world import CONFIG, World

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.messages import (
    Accepted,
    Beat,
    Confirmed,
    Failed,
    Message,
    Offer,
    Register,
    Released,
    encode_frame,
)
from kvpush.core.mode import Mode, ModeSetting


@pytest.fixture
def world() -> World:
    return World(mode=ModeSetting.PULL)


GOOD = (Outcome.DELIVERED, Reason.OK)


@pytest.mark.parametrize("start", [0, 3, 4, 8])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)])
def test_receiver_reads_exactly_its_span(start: int, sizes: tuple[int, int]) -> None:
    world = World(mode=ModeSetting.PULL)
    p = world.start("p", make_layout(0, sizes[0]))
    d = world.start("d", make_layout(1, sizes[1]))
    key = world.key()
    d.receive(key, p, 10, start)
    p.final(key, 10)
    world.settle()
    assert d.ended == GOOD
    assert [record.mode for record in (*p.records, *d.records)] == [Mode.PULL, Mode.PULL]


@pytest.mark.parametrize("final_first", [True, False])
def test_offer_comes_when_the_prompt_is_complete_in_either_order(world: World, final_first: bool) -> None:
    p, d = world.pair()
    key, offers = world.key(), list[Message]()
    world.judge(listen(offers, Offer))
    if final_first:
        p.final(key, 10)
        d.receive(key, p, 10)
    else:
        d.receive(key, p, 10)
        p.final(key, 5, last=False)
        world.run(1.0)
        assert not offers
        p.final(key, 10)
    world.settle()
    assert d.ended == GOOD
    assert len(set(offers)) == 1
    assert len(offers) <= 2, "the first heartbeat comes right behind the registration, and brings it again"


def test_both_sides_report_what_was_read(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    p.announce(key)
    p.final(key, 10)
    world.settle()
    sent, got = p.records[0], d.records[0]
    assert (sent.outcome, got.outcome) == (Outcome.DELIVERED, Outcome.DELIVERED)
    assert sent.nbytes == got.nbytes == 10 * p.layout.token_bytes
    assert (sent.writes, got.writes, got.descriptors > 0) == (0, 1, True)
    assert list(got.at) == ["requested", "registered", "accepted", "offered", "posted", "read", "ended"]
    assert {"announced", "registered", "final", "offered", "released"} <= set(sent.at)


def test_sender_keeps_its_blocks_until_they_are_released(world: World) -> None:
    p, d = world.pair()
    world.data.holding = lambda _: True
    key = world.hand_over(p, d)
    world.run(1.5 * CONFIG.lease_s)  # heartbeats keep the lease alive while it is read
    assert key in p.sources
    assert p.endpoint.notices_due == 1  # some transports let themselves be read only while they are polled
    world.data.land(world.data.in_flight[0])
    world.settle()
    assert key not in p.sources
    assert d.ended == GOOD


@pytest.mark.parametrize("token", [17, None])
def test_offer_waits_for_the_first_token_and_brings_it(world: World, token: int | None) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10, wants_token=True)
    p.final(key, 10)
    world.run(1.0)
    assert not world.data.writes
    p.sampled(key, token)
    world.settle()
    assert d.ended == GOOD
    assert d.received[key].token == token


# lost, doubled and late frames ----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [Register, Accepted, Offer, Released, Confirmed])
@pytest.mark.parametrize("fate", [Fate(copies=0), Fate(copies=2)])
def test_lost_or_doubled_frame_ends_in_delivery(world: World, kind: type[Message], fate: Fate) -> None:
    p, d = world.pair()
    world.judge(first(kind, fate))
    world.hand_over(p, d)
    world.settle()
    assert d.ended == GOOD


def test_confirmation_that_is_lost_every_time_is_learned_from_a_heartbeat(world: World) -> None:
    p, d = world.pair()
    world.judge(lose(Confirmed))
    world.hand_over(p, d)
    assert world.settle() < CONFIG.heartbeat_s + CONFIG.retry_s
    assert d.ended == GOOD


def test_released_that_never_arrives_gives_up_without_the_text(world: World) -> None:
    p, d = world.pair()
    world.judge(lose(Released))
    key = world.hand_over(p, d)
    world.settle()
    assert d.ended == (Outcome.FAILED, Reason.PEER_SILENT)
    assert not d.received[key].quarantined  # all reads had stopped: its blocks are its own


def test_lease_that_ended_early_never_gives_text(world: World) -> None:
    """The sender's word decides, not the receiver's clock."""
    p, d = world.pair()
    key = world.hand_over(p, d)
    world.run_until(lambda: world.data.in_flight)
    p.endpoint._sender._transfers[key].lease_until = world.now  # a clock that runs wrong
    p.endpoint._sender._timers.arm(key, world.now)
    world.settle()
    assert d.ended == (Outcome.FAILED, Reason.LEASE_EXPIRED)


def test_read_that_outlives_the_lease_is_not_believed(world: World) -> None:
    """Heartbeats are lost, the lease ends, the blocks are used again while they are read."""
    p, d = world.pair()
    key = world.stuck_in_flight(p, d)
    del p.endpoint._sender._transfers[key].at["offered"]  # no more offers are counted after it
    p.endpoint._sender._offers -= 1
    p.endpoint._sender._transfers[key].lease_until = world.now
    p.endpoint._sender._timers.arm(key, world.now)
    world.judge(lose(Failed, Beat))
    world.run(0.01)
    assert key not in p.sources
    world.data.land(world.data.in_flight[0])  # copies what others have written there
    world.settle()
    assert d.ended[0] is Outcome.FAILED


# what a peer must not say ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("blocks", "detail"),
    [
        (((0, 1, 64),), r"Offer.blocks\[0\]: id 64 is not in \[0, 64\)"),
        (((0, 1),), r"Offer.blocks\[0\]: 2 ids, but \[0, 10\) takes 3 blocks of 4"),
        (((0, 1, 1),), r"Offer.blocks\[0\]: an id occurs twice"),
        ((), "Offer.blocks: 0 lists of ids for 1 cache groups"),
    ],
)
def test_offer_of_impossible_blocks_is_refused_by_name(
    world: World, blocks: tuple[tuple[int, ...], ...], detail: str
) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    world.run(0.1)
    p.announce(key)
    transfer = p.endpoint._sender._transfers[key]
    assert transfer.caller is not None
    p.endpoint._outbox.send(transfer.caller.link, transfer.caller.epoch, Offer(key, blocks))
    p.tick()
    world.settle()
    assert d.ended == (Outcome.FAILED, Reason.BAD_BLOCK)
    assert re.search(detail, d.received[key].detail)
    assert not world.data.writes


def test_released_without_an_offer_changes_nothing(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    world.run(0.1)
    session = d.endpoint._outbound.get(p.target)
    assert session is not None
    world.network.send(d, session.link, encode_frame(d.endpoint._outbox.epoch, session.epoch, Released(key)))
    world.run(0.1)
    assert p.counts("out_of_order") == 1
    p.final(key, 10)
    world.settle()
    assert d.ended == GOOD


def test_registration_for_pull_with_blocks_is_refused(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    command = d.receive(key, p, 10)
    world.judge(lose(Register))
    world.run(0.1)
    session = d.endpoint._outbound.get(p.target)
    assert session is not None
    world.network.judges.clear()
    register = Register(key, command.span, command.blocks, session.clock, mode=Mode.PULL)
    world.network.send(d, session.link, encode_frame(d.endpoint._outbox.epoch, session.epoch, register))
    world.settle()
    assert d.ended[0] is Outcome.FAILED
