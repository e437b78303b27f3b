"""What is held for a receiver is held while it asks for it, and not much longer (R10); nothing is posted after (R2)."""

from itertools import count

import pytest
from core.faults import first, listen, lose
from core.network import LOST, Fate
from core.process import Process
from core.world import World

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.messages import Cancel, Heartbeat, Message, Register

SHORT = ProtocolConfig(lease_s=3.0, heartbeat_s=0.5, peer_timeout_s=2.0, quarantine_s=3.0)


@pytest.fixture
def world() -> World:
    return World(SHORT)


# renewal --------------------------------------------------------------------------------------------------
def test_source_is_kept_while_the_receiver_waits_in_its_queue(world: World) -> None:
    """B06: five times the lease, then the push succeeds."""
    p, d = world.pair()
    key = world.key()
    p.announce(key)
    d.expect(key, p)
    p.final(key, 10)
    world.run(5 * SHORT.lease_s)
    assert key in p.sources
    d.receive(key, p, 10)
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.DELIVERED
    assert p.counts("lease_renewed") >= 4
    assert p.counts("lease_expired") == 0


def test_source_is_freed_when_nobody_asks_for_it(world: World) -> None:
    p, _ = world.pair()
    key = world.key()
    p.final(key, 10)
    took = world.run_until(lambda: not p.sources)
    assert took == pytest.approx(SHORT.lease_s)
    assert p.counted["lease_expired", Reason.LEASE_EXPIRED] == 1
    assert p.records[0].outcome is Outcome.EXPIRED


def test_source_is_freed_at_the_end_of_its_lease_when_the_heartbeats_stop(world: World) -> None:
    """B06, the negative."""
    p, d = world.pair()
    key = world.key()
    d.expect(key, p)
    world.run(0.1)
    p.final(key, 10)
    world.run(1.0)
    world.judge(lose(Heartbeat))
    world.run(SHORT.lease_s - 2 * SHORT.heartbeat_s - 0.1)
    assert key in p.sources
    world.run(2 * SHORT.heartbeat_s)
    assert key not in p.sources


def test_receiver_waits_for_a_long_prefill_without_losing_its_lease(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    p.announce(key)
    d.receive(key, p, 10)
    world.run(10 * SHORT.lease_s)
    p.final(key, 10)
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_one_heartbeat_renews_all_leases_with_a_peer(world: World) -> None:
    p, d = world.pair()
    beats: list[Message] = []
    world.judge(listen(beats, Heartbeat))
    keys = world.keys(20)
    for key in keys:
        p.announce(key)
        d.expect(key, p)
    world.run(3.01)
    assert len(beats) == 3.0 / SHORT.heartbeat_s + 1
    assert isinstance(beats[-1], Heartbeat)
    assert set(beats[-1].keys) == set(keys)
    for key in keys:
        d.abort(key)
        p.withdraw(key)
    world.settle()


def test_one_lost_heartbeat_is_no_harm(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    beats = count()
    world.judge(lambda _s, _d, m: LOST if isinstance(m, Heartbeat) and next(beats) % 2 else None)
    d.expect(key, p)
    p.final(key, 10)
    world.run(20.0)
    d.receive(key, p, 10)
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_leases_end_by_time_and_not_in_the_order_in_which_they_began(world: World) -> None:
    p, d = world.pair()
    old, young = world.keys(2)
    d.expect(old, p)
    p.final(old, 4)
    world.run(1.0)
    p.final(young, 4)
    world.run(SHORT.lease_s - 0.5)
    assert set(p.sources) == {old, young}
    world.run(1.0)
    assert set(p.sources) == {old}
    d.abort(old)
    world.settle()


# echo -----------------------------------------------------------------------------------------------------
def test_heartbeat_that_was_long_under_way_does_not_extend_a_lease(world: World) -> None:
    """The lease runs from the sender's clock that it echoes. Else the receiver could not know when it has ended."""
    p, d = world.pair()
    key = world.key()
    d.expect(key, p)
    world.run(0.1)
    p.final(key, 10)
    world.judge(lambda _s, _d, message: Fate(delay_s=1.5) if isinstance(message, Heartbeat) else None)
    world.run(1.4)
    world.judge(lose(Heartbeat))
    heard = world.now
    world.run_until(lambda: key not in p.sources)
    assert world.now <= heard + SHORT.lease_s
    d.abort(key)
    world.settle()


def test_registration_that_was_longer_under_way_than_a_lease_is_not_written(world: World) -> None:
    """R1: it stayed in a broken connection until the receiver had given its blocks to others."""
    p, d = world.pair()
    key = world.key()
    d.expect(key, p)
    world.run(0.1)
    world.judge(first(Register, Fate(delay_s=30.0)))
    world.judge(lose(Register, Cancel))
    d.receive(key, p, 10)
    world.network.cut(d)
    world.run_until(lambda: key in d.received, within=20.0)
    world.run_until(lambda: world.now > 129.0, within=30.0)
    p.final(key, 10)
    world.run(2.0)
    assert p.records[0].at["registered"] > world.now - 2.0
    assert not world.data.writes
    world.settle()


def test_echo_of_the_future_begins_no_lease_longer_than_others(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    world.run(0.01)
    session = d.endpoint._outbound.get(d.target) or d.endpoint._outbound.get(p.target)
    assert session is not None
    session.clock = 1e9
    world.run(1.0)
    world.network.part(p, d)
    world.run_until(lambda: p.counts("lease_expired") + p.counts("peer_lost") > 0)
    assert p.endpoint.transfers == 0
    world.settle()


# expiry and writing ---------------------------------------------------------------------------------------
def test_nothing_is_posted_once_the_lease_has_ended(world: World) -> None:
    """B26: registered, then silence; the prompt is final when the lease has ended."""
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    p.announce(key)
    world.run(0.1)
    world.judge(lose(Heartbeat, Register))
    world.run(SHORT.lease_s + 0.1)
    p.final(key, 10)
    assert not world.data.writes
    assert key not in p.sources
    world.settle()
    assert d.received[key].outcome is Outcome.FAILED


def test_handshake_that_takes_longer_than_the_lease_leads_to_no_write(world: World) -> None:
    """B26: the first message of the receiver is held up until its source has gone."""
    p, d = world.pair()
    key = world.key()
    p.final(key, 10)
    world.network.black_holes.add(p.address)
    d.receive(key, p, 10)
    world.run(SHORT.lease_s + 1.0)
    world.network.black_holes.clear()
    world.settle()
    assert d.received[key].reason is Reason.LEASE_EXPIRED
    assert not world.data.writes


@pytest.mark.parametrize("end", ["cancel", "lease"])
def test_post_that_waits_in_the_drivers_queue_is_given_up_when_its_transfer_ends(world: World, end: str) -> None:
    """B26: checked again right before the post, whatever has happened since it was asked for."""
    p, d = world.pair()
    key = world.key()
    world.data.queueing = lambda _: 3.0
    d.receive(key, p, 10)
    p.final(key, 10)
    world.run(0.1)
    if end == "cancel":
        d.abort(key)
    else:
        world.judge(lose(Heartbeat))
    world.settle()
    assert not world.data.writes
    assert d.received[key].outcome is Outcome.FAILED


def test_write_in_flight_when_the_lease_ends_is_waited_for() -> None:
    world = World(ProtocolConfig(lease_s=3.0, heartbeat_s=0.5))
    p, d = world.pair()
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 20)
    world.run(0.1)
    p.final(key, 10, last=False)
    world.judge(lose(Heartbeat))
    world.run_until(lambda: p.counts("lease_expired"))
    p.final(key, 20)
    world.run(0.1)
    assert key in p.sources
    assert len(world.data.writes) == 1
    world.data.land(world.data.in_flight[0])
    world.settle()


def test_registration_that_no_request_follows_is_given_up_soon(world: World) -> None:
    """The receiver learns within `unannounced_s` that the prefill never came, not by its lease."""
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    took = world.settle(within=30.0)
    assert took == pytest.approx(SHORT.unannounced_s, abs=0.1)
    assert d.received[key].reason is Reason.NEVER_ANNOUNCED
    p.announce(key)
    p.final(key, 10)
    assert key not in p.sources


def test_receive_that_is_never_written_ends_at_its_deadline() -> None:
    """R4: accepted, renewed, and the prefill hangs for ever."""
    world = World(ProtocolConfig(transfer_s=60.0))
    p, d = world.pair()
    key = world.key()
    p.announce(key)
    d.receive(key, p, 10)
    took = world.run_until(lambda: key in d.received, within=100.0)
    assert took == pytest.approx(60.0, abs=0.1)
    assert d.received[key].reason is Reason.DEADLINE
    p.withdraw(key)
    world.settle()


# both sides agree on time ---------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", [0.0, 0.3, 0.9, 1.6, 2.2])
@pytest.mark.parametrize("one_way", ["to p", "to d", "both"])
def test_receiver_outwaits_the_lease_whatever_is_lost_between(world: World, cut: float, one_way: str) -> None:
    """R1: the oracle fails if a write that is posted at the last moment lands after the blocks went back."""
    p, d = world.pair()
    key = world.key()
    landing = SHORT.quarantine_s - 0.1
    world.data.holding = lambda _: True
    d.receive(key, p, 20)
    p.announce(key)
    world.run(1.0 + cut)
    lost: dict[str, set[Process]] = {"to p": {p}, "to d": {d}, "both": {p, d}}
    world.judge(lambda _s, destination, _m: LOST if destination in lost[one_way] else None)
    tokens = 4
    while p.endpoint.transfers and tokens < 20:
        p.final(key, tokens, last=False)
        for write in world.data.in_flight:
            world.at(write.posted_at + landing, lambda write=write: world.data.land(write))  # type: ignore[misc]
        tokens += 1
        world.run(0.2)
    if tokens < 20 or key in p.sources:
        p.withdraw(key)
    world.settle()
