"""Cancelling is acknowledged in each state of the sender (R9), and no block is given back before that (R1)."""

from functools import partial

import pytest
from core.faults import listen, lose
from core.network import LOST
from core.process import Process
from core.world import World

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.messages import Cancel, Drained, Draining, Dropped, Failed, Message


def transfer(world: World, p: Process, d: Process) -> None:
    """Something goes well between the two."""
    key = world.key()
    d.receive(key, p, 1)
    p.final(key, 1)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED


ANSWERS = (Dropped, Draining, Drained, Failed)


# B21: the states of the sender ----------------------------------------------------------------------------
def test_abort_is_answered_with_dropped_when_nothing_was_posted(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    said: list[Message] = []
    world.judge(listen(said, *ANSWERS))
    d.receive(key, p, 10)
    p.announce(key)
    world.run(0.1)
    d.abort(key)
    assert world.run_until(lambda: key in d.received) < 0.01
    assert said == [Dropped(key)]
    assert (d.received[key].outcome, d.received[key].reason) == (Outcome.FAILED, Reason.ABORTED)
    p.final(key, 10)
    world.settle()
    assert not world.data.writes


def test_abort_keeps_the_blocks_until_posted_writes_have_drained(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    said: list[Message] = []
    world.judge(listen(said, *ANSWERS))
    d.receive(key, p, 10)
    p.final(key, 10)
    world.run(0.1)
    d.abort(key)
    world.run(20.0)
    assert key not in d.received
    assert set(map(type, said)) == {Draining}
    world.data.land(world.data.in_flight[0])
    world.settle(within=0.1)
    assert d.received[key].reason is Reason.ABORTED


def test_abort_after_the_sender_has_finished_is_answered(world: World, pair: tuple[Process, Process]) -> None:
    """The notice is still on its way when the request goes away."""
    p, d = pair
    key = world.key()
    world.data.notice_delay = lambda _: 1.0
    said: list[Message] = []
    world.judge(listen(said, *ANSWERS))
    d.receive(key, p, 10)
    p.final(key, 10)
    world.run_until(lambda: not p.sources)
    d.abort(key)
    world.settle(within=1.1)
    assert said == [Dropped(key)]
    assert d.received[key].outcome is Outcome.FAILED
    assert d.counted["late_notice", Reason.RETIRED_TRANSFER] == 1


def test_abort_of_an_expected_request_frees_the_source_at_once(world: World, pair: tuple[Process, Process]) -> None:
    """B05: the receiver has every token already."""
    p, d = pair
    key = world.key()
    d.expect(key, p)
    p.final(key, 10)
    world.run(1.0)
    d.abort(key, Reason.NOT_NEEDED)
    assert world.settle() < 0.01
    assert [(r.outcome, r.reason) for r in p.records + d.records] == [(Outcome.DELIVERED, Reason.NOT_NEEDED)] * 2


def test_abort_before_the_sender_was_reached_frees_the_blocks_at_once(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    d.abort(key)
    assert d.received[key].reason is Reason.ABORTED
    p.final(key, 10)
    world.settle(within=0.1)
    assert p.records[0].reason is Reason.ABORTED


def test_abort_of_what_is_not_needed_is_no_delivery_when_blocks_were_asked_for(
    world: World, pair: tuple[Process, Process]
) -> None:
    """R6: whatever the engine calls it, the blocks hold nothing."""
    p, d = pair
    key = world.key()
    d.receive(key, p, 10)
    world.run(0.1)
    d.abort(key, Reason.NOT_NEEDED)
    p.final(key, 10)
    world.settle()
    assert d.received[key].outcome is Outcome.FAILED


def test_cancelled_key_stays_refused(world: World, pair: tuple[Process, Process]) -> None:
    """B26: what the sender has dropped stays dropped, long after."""
    p, d = pair
    key = world.key()
    d.expect(key, p)
    world.run(0.1)
    d.abort(key)
    world.run(600.0)
    p.announce(key)
    p.final(key, 10)
    assert key not in p.sources
    other = world.start("other")
    other.receive(key, p, 10)
    world.settle(within=0.1)
    assert other.received[key].reason is Reason.ABORTED
    assert p.counted["late_message", Reason.RETIRED_TRANSFER] == 1


def test_abort_of_an_unknown_or_ended_transfer_is_ignored(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    d.abort(key)
    d.receive(key, p, 10)
    p.final(key, 10)
    world.settle()
    d.abort(key)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED
    assert len(d.records) == 1


# lost words -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [Cancel, Dropped])
def test_cancel_is_repeated_until_it_is_answered(
    world: World, pair: tuple[Process, Process], kind: type[Message]
) -> None:
    p, d = pair
    key = world.key()
    d.receive(key, p, 10)
    world.run(0.1)
    losses = iter([LOST, LOST])
    world.judge(lambda _s, _d, message: next(losses, None) if isinstance(message, kind) else None)
    d.abort(key)
    took = world.run_until(lambda: key in d.received)
    assert 2 * world.config.retry_s < took < 3 * world.config.retry_s


def test_lost_drained_is_repaired_by_the_next_cancel(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    world.judge(lose(Drained))
    d.receive(key, p, 10)
    p.final(key, 10)
    world.run(0.1)
    d.abort(key)
    world.run(0.1)
    world.data.fail(world.data.in_flight[0], "broken")
    took = world.run_until(lambda: key in d.received)
    assert took <= world.config.retry_s


# the sender's side ----------------------------------------------------------------------------------------
REASONS = [Reason.PREFILL_ABORTED, Reason.PREFILL_PREEMPTED, Reason.PREFILL_FAILED]


@pytest.mark.parametrize("reason", REASONS)
def test_receiver_is_told_at_once_when_the_prefill_ends(
    world: World, pair: tuple[Process, Process], reason: Reason
) -> None:
    p, d = pair
    key = world.key()
    d.receive(key, p, 10)
    p.announce(key)
    world.run(1.0)
    p.withdraw(key, reason)
    assert world.settle() < 0.01
    assert d.received[key].reason is reason


def test_receiver_that_asks_after_the_prefill_has_ended_is_told_why(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    key = world.key()
    p.announce(key)
    p.withdraw(key, Reason.PREFILL_ABORTED)
    d.receive(key, p, 10)
    assert world.settle() < 0.02
    assert d.received[key].reason is Reason.PREFILL_ABORTED


def test_receiver_that_expects_learns_from_its_heartbeat_that_the_prefill_has_ended(
    world: World, pair: tuple[Process, Process]
) -> None:
    """It fails at once when it has blocks, without asking anyone."""
    p, d = pair
    key = world.key()
    p.announce(key)
    d.expect(key, p)
    world.run(0.1)
    p.withdraw(key, Reason.PREFILL_ABORTED)
    world.run(world.config.heartbeat_s + 0.1)
    d.receive(key, p, 10)
    assert d.received[key].reason is Reason.PREFILL_ABORTED


def test_source_stays_pinned_while_an_early_write_reads_it(world: World, pair: tuple[Process, Process]) -> None:
    """B32: the request is preempted while its first chunk is being written."""
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 20)
    world.run(0.1)
    p.final(key, 12, last=False)
    p.withdraw(key, Reason.PREFILL_PREEMPTED)
    world.run(5.0)
    assert key in p.sources
    assert key not in d.received
    world.data.land(world.data.in_flight[0])
    world.settle(within=0.1)
    assert d.received[key].reason is Reason.PREFILL_PREEMPTED


def test_first_of_several_writes_fails_and_the_others_are_waited_for(
    world: World, pair: tuple[Process, Process]
) -> None:
    """B25 and B04: no block is reusable before the last write has stopped; one failure is one failure."""
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 16)
    world.run(0.1)
    for tokens in (4, 8, 12):
        p.final(key, tokens, last=False)
    p.final(key, 16)
    first, *others = world.data.in_flight
    world.data.fail(first, "broken")
    world.run(4.9)
    assert key not in d.received
    assert key in p.sources
    for write in others:
        world.data.land(write)
    world.settle(within=0.1)
    assert d.received[key].reason is Reason.TRANSPORT
    assert [record.reason for record in p.records] == [Reason.TRANSPORT]


def test_write_that_cannot_be_posted_is_told_at_once(world: World, pair: tuple[Process, Process]) -> None:
    """B02: in far less than a second, not by lease."""
    p, d = pair
    key = world.key()
    world.data.refuses = lambda _: "no such memory"
    d.receive(key, p, 10)
    p.final(key, 10)
    assert world.settle() < 0.05
    assert d.received[key].reason is Reason.TRANSPORT
    assert "no such memory" in d.received[key].detail


# many at once ---------------------------------------------------------------------------------------------
def test_storm_of_aborts_leaves_nothing_behind(world: World) -> None:
    """B20: nearly everything is aborted at whatever stage it is; the rest arrives, and nobody waits for the dead."""
    p, d = world.pair()
    keys = world.keys(30)
    for i, key in enumerate(keys):
        world.after(i * 0.003, partial(d.receive, key, p, 8))
        world.after(i % 7 * 0.02, partial(p.final, key, 8))
        if i % 10:
            world.after(i * 0.003 + i % 5 * 0.004, partial(d.abort, key))
    world.run(0.2)
    assert world.settle() < 1.0
    assert all(d.received[key].outcome is Outcome.DELIVERED for key in keys[::10])
    assert len(p.free) == len(d.free) == 64


# silence --------------------------------------------------------------------------------------------------
def test_aborted_blocks_come_back_when_the_sender_never_answers(world: World, pair: tuple[Process, Process]) -> None:
    """B01: the requests end soon, their blocks come back not before the lease and the quarantine have passed, not much
    later, and each is counted once."""
    p, d = pair
    config = world.config
    keys = world.keys(4)
    for key in keys:
        d.receive(key, p, 32)
    world.run(0.1)
    world.network.part(p, d)
    for key in keys:
        d.abort(key)
    took = world.run_until(lambda: len(d.received) == 4, within=20.0)
    assert took <= config.peer_timeout_s
    world.run(config.lease_s + config.quarantine_s - 2 * config.peer_timeout_s)
    assert len(d.free) == 64 - 4 * 8
    took = world.settle()
    assert took <= 2 * config.peer_timeout_s + config.heartbeat_s
    assert {d.received[key].reason for key in keys} == {Reason.ABORTED}
    assert d.counts("recv_abandoned") == 4
    assert len(d.free) == 64


def test_late_completion_after_the_quarantine_is_ignored(world: World, pair: tuple[Process, Process]) -> None:
    """B01, the end of it: the notice comes when nobody waits for it any more."""
    p, d = pair
    key = world.key()
    world.data.notice_delay = lambda _: 200.0
    d.receive(key, p, 10)
    world.run(0.1)
    p.final(key, 10)
    world.run(0.0005)
    p.kill()
    world.settle()
    world.run(200.0)
    assert d.counted["late_notice", Reason.RETIRED_TRANSFER] == 1
    assert len(d.records) == 1


def test_slow_write_of_a_living_sender_is_waited_for_longer_than_a_quarantine() -> None:
    """R1: the sender says again and again that it is draining, so nothing has to be guessed from time."""
    world = World(ProtocolConfig(lease_s=8.0, quarantine_s=5.0))
    p, d = world.pair()
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 10)
    p.final(key, 10)
    world.run(0.1)
    d.abort(key)
    world.run(world.config.lease_s + 1.0)
    assert key not in d.received
    world.data.land(world.data.in_flight[0])
    world.settle(within=0.1)


def test_write_that_never_stops_costs_the_connection_and_nothing_more(
    world: World, pair: tuple[Process, Process]
) -> None:
    """R4: a transport that does not report a write of an ended transfer has to give it up, and everything ends."""
    p, d = pair
    key = world.key()
    world.data.holding = lambda write: write.key == key
    d.receive(key, p, 10)
    p.final(key, 10)
    world.run(0.1)
    d.abort(key)
    took = world.settle()
    fence = world.config.lease_s + world.config.fence_s
    assert fence < took < fence + 1.5
    assert p.counted["write_stuck", Reason.ABORTED] == 1
    transfer(world, p, d)
