"""Peers that cannot be reached, die, come back, hang or are not whom one takes them for: R7, R11."""

from functools import partial

import pytest
from core.faults import listen, lose
from core.memory import make_layout
from core.process import Process
from core.world import World

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.ids import Address, EngineId, Epoch, Target
from kvpush.core.messages import Dropped, Failed, Heartbeat, Message, Written, encode_frame


def transfer(world: World, p: Process, d: Process, within: float = 0.2) -> None:
    """Something goes well between the two."""
    key = world.key()
    d.receive(key, p, 6)
    p.final(key, 6)
    world.run_until(lambda: key in d.received, within)
    assert d.received[key].outcome is Outcome.DELIVERED


# handshakes -----------------------------------------------------------------------------------------------
def test_black_hole_delays_nobody_else(world: World) -> None:
    """B03, R7: 20 transfers with a healthy sender take what they always take."""
    healthy, d = world.pair()
    hole = Target(Address("10.9.9.9", 1), None)
    lost = world.key()
    d.receive(lost, hole, 8)
    took = []
    for _ in range(20):
        began = world.now
        transfer(world, healthy, d, within=0.05)
        took.append(world.now - began)
        world.run(0.1)
    assert max(took[1:]) <= min(took[1:]) + 0.001
    world.run_until(lambda: lost in d.received)
    assert d.received[lost].reason is Reason.PEER_HANDSHAKE
    assert d.records[-1].at["ended"] - d.records[-1].at["requested"] == pytest.approx(world.config.connect_timeout_s)


def test_peer_that_the_transport_cannot_load_is_refused_at_once(world: World) -> None:
    p, d = world.pair()
    world.data.peer_error = lambda _source, peer: "bad metadata" if peer is d else ""
    key, other = world.keys(2)
    d.receive(key, p, 8)
    assert world.run_until(lambda: key in d.received) < 0.1
    assert d.received[key].reason is Reason.PEER_HANDSHAKE
    assert "bad metadata" in d.received[key].detail
    good = world.start("good")
    good.receive(other, p, 8)
    p.final(other, 8)
    world.settle()
    assert good.received[other].outcome is Outcome.DELIVERED


def test_link_that_is_refused_fails_what_waits_for_it(world: World, pair: tuple[Process, Process]) -> None:
    """The peer has another secret: no time-out has to pass."""
    p, d = pair
    key = world.key()
    world.network.black_holes.add(p.address)
    d.receive(key, p, 8)
    session = d.endpoint._outbound.get(p.target)
    assert session is not None
    d.input(lambda now: d.endpoint.link_refused(session.link, now))
    assert d.received[key].reason is Reason.PEER_HANDSHAKE
    world.settle()


def test_sender_that_is_another_engine_refuses(world: World, pair: tuple[Process, Process]) -> None:
    """B34: the address belongs to someone else by now; the answer comes at once and names the engine."""
    p, d = pair
    key = world.key()
    d.receive(key, Target(p.address, EngineId("q")), 8)
    assert world.settle() < 0.1
    assert d.received[key].reason is Reason.WRONG_ENGINE
    assert "this is p" in d.received[key].detail


def test_two_targets_of_one_process_do_not_disturb_each_other(world: World, pair: tuple[Process, Process]) -> None:
    """A router that knows the engine's id and one that does not; the sender answers on the link it heard last."""
    p, d = pair
    keys = world.keys(8)
    for i, key in enumerate(keys):
        d.receive(key, Target(p.address, EngineId("p") if i % 2 else None), 6)
        p.announce(key)
    world.run(10.0)
    for key in keys[:4]:
        p.final(key, 6)
    for key in keys[4:]:
        p.withdraw(key)
    assert world.settle() < 0.1
    assert [d.received[key].outcome for key in keys] == [Outcome.DELIVERED] * 4 + [Outcome.FAILED] * 4
    assert d.counts("late_message") == 0


# links that break -----------------------------------------------------------------------------------------
def test_link_that_breaks_and_comes_back_costs_no_transfer(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    keys = world.keys(30)
    for i, key in enumerate(keys):
        world.after(i * 0.0011, partial(d.receive, key, p, 6))
        world.after(i * 0.0037, partial(p.final, key, 6))
    for _ in range(12):
        world.run(0.01)
        world.network.cut(d)
    world.settle(within=5.0)
    assert {d.received[key].outcome for key in keys} == {Outcome.DELIVERED}


@pytest.mark.parametrize("kind", [Failed, Dropped])
def test_word_that_is_lost_with_its_link_is_learned_soon(
    world: World, pair: tuple[Process, Process], kind: type[Message]
) -> None:
    p, d = pair
    key = world.key()
    d.receive(key, p, 6)
    p.announce(key)
    world.run(0.1)
    world.judge(lose(kind))
    p.withdraw(key) if kind is Failed else d.abort(key)
    world.run(0.01)
    world.network.cut(d)
    world.network.judges.clear()
    assert world.run_until(lambda: key in d.received) < 1.0
    p.withdraw(key)
    world.settle()


def test_nothing_is_registered_over_a_broken_link_before_the_peer_has_answered(
    world: World, pair: tuple[Process, Process]
) -> None:
    """Blocks of a request that comes right after a crash are free again when the handshake times out, because they
    were never promised to anyone."""
    p, d = pair
    transfer(world, p, d)
    p.kill()
    world.run(0.01)
    key = world.key()
    d.receive(key, p, 8)
    took = world.run_until(lambda: key in d.received, within=6.0)
    assert took <= world.config.doubt_s
    assert d.received[key].reason is Reason.PEER_LOST
    assert d.counts("recv_abandoned") == 0


# death ----------------------------------------------------------------------------------------------------
def test_blocks_that_a_dead_sender_may_write_to_are_quarantined(world: World, pair: tuple[Process, Process]) -> None:
    """R1: its last write lands long after it has died. The request that waited for it goes on at once."""
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    world.data.notice_delay = lambda _: None
    d.receive(key, p, 8)
    p.final(key, 8)
    world.run(0.1)
    p.kill()
    (write,) = world.data.in_flight
    world.after(world.config.lease_s + world.config.quarantine_s - 1.0, partial(world.data.land, write))
    assert world.run_until(lambda: key in d.received) < world.config.doubt_s + 0.1
    assert d.received[key].quarantined
    assert len(d.free) == 64 - 2
    took = world.run_until(lambda: key not in d.quarantined, within=100.0)
    assert took == pytest.approx(world.config.lease_s + world.config.quarantine_s - world.config.doubt_s, abs=0.2)
    assert d.counts("recv_abandoned") == 1
    world.settle()


def test_notice_that_arrives_in_the_quarantine_ends_it(world: World, pair: tuple[Process, Process]) -> None:
    """All that could be written has been: there is nothing to wait for."""
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 8)
    p.final(key, 8)
    world.run(0.1)
    p.kill()
    world.run(20.0)
    world.data.land(world.data.in_flight[0])
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.FAILED


def test_dead_receiver_is_let_go_without_a_new_handshake(world: World, pair: tuple[Process, Process]) -> None:
    """B35: agent, handles and mappings within the time to doubt; and the source blocks with them."""
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 8)
    p.final(key, 8)
    world.run(0.1)
    d.kill()
    took = world.run_until(lambda: not p.peers and not p.sources, within=20.0)
    assert took <= world.config.doubt_s + 0.1
    assert p.counted["peer_lost", Reason.PEER_LOST] == 1
    world.settle()


def test_peer_with_an_active_transfer_is_never_let_go_for_its_age(world: World, pair: tuple[Process, Process]) -> None:
    """B35, the opposite."""
    p, d = pair
    key = world.key()
    p.announce(key)
    d.receive(key, p, 8)
    world.run(1000.0)
    assert p.counts("peer_lost") == 0
    p.final(key, 8)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED


def test_dead_sender_is_lost_once_however_often_it_is_looked_for(world: World, pair: tuple[Process, Process]) -> None:
    """I5: while its blocks are in quarantine it is tried again and again."""
    p, d = pair
    key = world.key()
    d.receive(key, p, 8)
    p.announce(key)
    world.run(0.1)
    p.kill()
    world.settle()
    assert d.received[key].reason is Reason.PEER_LOST
    assert d.counts("peer_lost") == d.counts("recv_abandoned") == 1
    assert len([change for change in d.changes if not change.ready]) > 1, "it was looked for"


def test_registration_that_dies_with_its_sender_is_not_blamed_on_silence() -> None:
    """The time for its answer is over before the time for the sender's return."""
    world = World(ProtocolConfig(connect_timeout_s=1.0))
    p, d = world.pair()
    transfer(world, p, d)
    key = world.key()
    d.receive(key, p, 8)
    p.kill()
    world.settle()
    assert d.received[key].reason is Reason.PEER_LOST


# restart --------------------------------------------------------------------------------------------------
def test_restarted_sender_serves_at_once(world: World, pair: tuple[Process, Process]) -> None:
    """B33: five times; the receiver stays what it is."""
    p, d = pair
    for _ in range(5):
        transfer(world, p, d)
        lost = world.key()
        d.receive(lost, p, 4)
        p.announce(lost)
        world.run(0.1)
        p = world.restart(p)
        began = world.now
        world.run(0.5)
        transfer(world, p, d, within=5.0)
        assert world.now - began < 5.0
        world.run_until(lambda lost=lost: lost in d.received, within=100.0)  # type: ignore[misc]
        assert d.received[lost].reason is Reason.PEER_RESTARTED
    world.settle()


def test_restarted_receiver_is_served_at_once(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    for _ in range(5):
        transfer(world, p, d)
        lost = world.key()
        world.data.holding = lambda write, lost=lost: write.key == lost  # type: ignore[misc]
        d.receive(lost, p, 4)
        p.final(lost, 4)
        world.run(0.1)
        d = world.restart(d)
        transfer(world, p, d)
        assert len(p.peers) == 1
        assert lost not in p.sources
    world.settle()


def test_word_of_a_restarted_sender_frees_nothing_of_the_old_one(world: World, pair: tuple[Process, Process]) -> None:
    """R11 and R1: it knows nothing of what the dead process has posted."""
    p, d = pair
    key = world.key()
    world.data.holding = lambda write: write.key == key
    d.receive(key, p, 8)
    p.final(key, 8)
    world.run(0.1)
    p2 = world.restart(p)
    world.run(0.5)
    transfer(world, p2, d)
    session = d.endpoint._outbound.get(p2.target)
    assert session is not None
    for word in (Dropped(key), Failed(key, Reason.ABORTED, ""), Written(key)):
        frame = encode_frame(Epoch(1000 + p2.number), Epoch(1000 + d.number), word)
        world.network.deliver(d, session.link, frame)
    world.run(5.0)
    assert d.quarantined == {key}
    world.data.land(world.data.in_flight[0])
    world.settle()


def test_message_for_the_process_before_a_restart_is_refused(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    transfer(world, p, d)
    p2 = world.restart(p)
    world.run(1.0)
    old = encode_frame(Epoch(1000 + d.number), Epoch(1000 + p.number), Heartbeat(1.0, ()))
    before = p2.counted["refused", Reason.WRONG_ENGINE]
    p2.input(lambda now: p2.endpoint.frame_received(-99, old, now))  # type: ignore[arg-type]
    assert p2.counted["refused", Reason.WRONG_ENGINE] == before + 1


# silence --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("who", ["p", "d"])
@pytest.mark.parametrize("hangs_s", [1.0, 8.0, 15.0, 45.0, 120.0])
def test_process_that_hangs_and_wakes_harms_nobody(
    world: World, pair: tuple[Process, Process], who: str, hangs_s: float
) -> None:
    """SIGSTOP and SIGCONT at every stage of a transfer; short ones cost nothing."""
    p, d = pair
    transfer(world, p, d)
    keys = world.keys(8)
    for i, key in enumerate(keys):
        world.after(i * 0.0021, partial(d.receive, key, p, 6))
        world.after(i * 0.0033, partial(p.final, key, 6))
    world.run(0.01)
    stopped = p if who == "p" else d
    stopped.hang()
    world.run(hangs_s)
    stopped.resume()
    world.run(10.0)
    assert set(keys) <= set(d.received)
    if hangs_s < 5.0:
        assert {d.received[key].outcome for key in keys} == {Outcome.DELIVERED}
    world.settle()
    transfer(world, p, d, within=6.0)


@pytest.mark.parametrize("parted_s", [1.0, 4.0, 12.0, 25.0])
def test_partition_that_heals_ends_every_transfer_soon_after(
    world: World, pair: tuple[Process, Process], parted_s: float
) -> None:
    """A sender that was lost and is back is asked for its word: no lease and no quarantine have to pass."""
    p, d = pair
    keys = world.keys(4)
    for key in keys:
        p.announce(key)
        d.receive(key, p, 6)
    world.run(0.1)
    world.network.part(p, d)
    world.run(parted_s)
    world.network.heal()
    for key in keys[:2]:
        p.final(key, 6)
    for key in keys[2:]:
        p.withdraw(key)
    assert world.settle() < 2 * world.config.connect_timeout_s + 1.0
    transfer(world, p, d, within=6.0)


def test_receiver_that_was_forgotten_says_hello_again(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    transfer(world, p, d)
    key = world.key()
    d.expect(key, p)
    world.judge(lose(Heartbeat))
    world.run_until(lambda: p.counts("peer_lost"), within=20.0)
    world.network.judges.clear()
    world.run(5.0)
    d.abort(key)
    transfer(world, p, d, within=1.0)
    world.settle()


def test_idle_peers_cost_one_heartbeat_each_and_nothing_grows(world: World) -> None:
    p = world.start("p")
    receivers = [world.start(f"d{i}", make_layout(i + 1)) for i in range(5)]
    for d in receivers:
        transfer(world, p, d)
    beats: list[Message] = []
    world.judge(listen(beats, Heartbeat))
    world.run(100.0)
    assert len(beats) == pytest.approx(5 * 100.0 / world.config.heartbeat_s, abs=5)
    assert len(p.peers) == 5
    for d in receivers:
        d.kill()
    world.run(world.config.peer_timeout_s + 1.0)
    assert not p.peers
    assert p.endpoint.next_deadline() is None
