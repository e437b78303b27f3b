"""Pull: clients that leave, senders that give up, peers that die: while it is offered, read and released."""

import pytest
from core.faults import listen, lose
from core.world import CONFIG, World

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.messages import Cancel, Dropped, Message, Released
from kvpush.core.mode import ModeSetting
from kvpush.core.tables import Recv, Send


@pytest.fixture
def world() -> World:
    return World(mode=ModeSetting.PULL)


GOOD = (Outcome.DELIVERED, Reason.OK)


# cancel ---------------------------------------------------------------------------------------------------
def test_abort_before_the_offer_gives_the_blocks_back_at_once(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    world.run(0.5)
    d.abort(key)
    assert key not in d.destinations
    world.settle()
    assert d.ended == (Outcome.FAILED, Reason.ABORTED)


def test_abort_while_reading_waits_for_the_reads(world: World) -> None:
    p, d = world.pair()
    world.data.holding = lambda _: True
    heard: list[Message] = []
    world.judge(listen(heard, Cancel, Dropped))
    key = world.hand_over(p, d)
    world.run_until(lambda: world.data.in_flight)
    d.abort(key)
    world.run(1.5 * CONFIG.lease_s)
    assert key in d.destinations  # no block comes back under a READ
    assert key in p.sources
    assert not heard
    world.data.land(world.data.in_flight[0])
    world.settle()
    assert [type(message) for message in heard] == [Cancel, Dropped]
    assert d.ended == (Outcome.FAILED, Reason.ABORTED)
    assert key not in p.sources


def test_abort_while_the_read_waits_to_be_posted_posts_nothing(world: World) -> None:
    p, d = world.pair()
    world.data.queueing = lambda _: 1.0
    key = world.hand_over(p, d)
    world.run_until(lambda: d.endpoint.ops_in_flight)
    d.abort(key)
    world.settle()
    assert not world.data.writes
    assert d.ended == (Outcome.FAILED, Reason.ABORTED)


def test_reads_that_do_not_stop_after_an_abort_are_given_up_and_quarantined(world: World) -> None:
    p, d = world.pair()
    key = world.stuck_in_flight(p, d)
    d.abort(key)
    took = world.run_until(lambda: key in d.received, within=2 * CONFIG.drain_s)
    assert took == pytest.approx(CONFIG.drain_s, abs=0.1)
    assert d.received[key].quarantined
    assert d.counted["read_stuck", Reason.ABORTED] == 1
    assert world.run_until(lambda: key not in d.destinations, 60) == pytest.approx(CONFIG.quarantine_s, abs=0.1)
    world.settle()


# the sender ends ------------------------------------------------------------------------------------------
def test_prefill_that_is_aborted_before_the_offer_is_told_at_once(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    p.announce(key)
    d.receive(key, p, 10)
    world.run(0.5)
    p.withdraw(key)
    assert world.run_until(lambda: key in d.received) < 0.1
    assert d.ended == (Outcome.FAILED, Reason.PREFILL_ABORTED)
    world.settle()


def test_prompt_that_is_shorter_than_asked_for_is_told(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    p.final(key, 9)
    world.settle()
    assert d.ended == (Outcome.FAILED, Reason.SPAN_NOT_COVERED)


def test_sender_that_stops_while_it_is_read_keeps_its_blocks_until_the_reads_have_stopped(world: World) -> None:
    p, d = world.pair()
    key = world.stuck_in_flight(p, d)
    p.stop()
    world.run(0.5)
    assert p.endpoint._sender._transfers[key].state is Send.RECALLED
    assert d.endpoint._receiver._transfers[key].state is Recv.STOPPING
    assert key in p.sources
    world.data.land(world.data.in_flight[0])
    world.run_until(lambda: p.stopped)
    assert d.ended == (Outcome.FAILED, Reason.SHUTDOWN)
    world.settle()


def test_preempted_prompt_is_offered_when_it_has_been_computed_again(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    p.final(key, 8, last=False)
    world.run(0.1)
    p.preempt(key)
    p.final(key, 10)
    world.settle()
    assert d.ended == GOOD


# peers ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("holding", [True, False])
def test_sender_that_dies_while_it_is_read_fails_the_request_at_once(world: World, holding: bool) -> None:
    p, d = world.pair()
    world.data.holding = lambda _: holding
    key = world.hand_over(p, d)
    world.run_until(lambda: world.data.in_flight)
    p.kill()
    assert world.run_until(lambda: key in d.received) <= CONFIG.doubt_s + 0.2
    assert d.ended[0] is Outcome.FAILED
    assert d.received[key].quarantined == holding  # a read that has not stopped may still land
    world.settle()


def test_restarted_sender_cannot_confirm_what_the_dead_one_offered(world: World) -> None:
    p, d = world.pair()
    world.judge(lose(Released))
    key = world.hand_over(p, d)
    world.run_until(lambda: d.endpoint._receiver._transfers[key].state is Recv.RELEASING)
    again = world.restart(p)
    world.network.judges.clear()
    world.settle()
    assert d.ended == (Outcome.FAILED, Reason.PEER_RESTARTED)
    other = world.key()
    d.receive(other, again, 10)
    again.final(other, 10)
    world.settle()
    assert d.received[other].outcome is Outcome.DELIVERED


def test_sender_that_hangs_while_it_is_read_is_lost_and_its_reads_are_quarantined(world: World) -> None:
    p, d = world.pair()
    key = world.stuck_in_flight(p, d)
    p.hang()
    world.run_until(lambda: key in d.received, within=CONFIG.peer_timeout_s + 1)
    assert d.ended == (Outcome.FAILED, Reason.PEER_SILENT)
    assert d.received[key].quarantined
    p.resume()
    world.settle()


def test_receiver_that_dies_frees_the_source(world: World) -> None:
    p, d = world.pair()
    key = world.stuck_in_flight(p, d)
    d.kill()
    world.run_until(lambda: key not in p.sources, within=CONFIG.doubt_s + 1)
    world.data.fail(world.data.in_flight[0], "nobody reads")
    world.settle()


def test_connection_that_breaks_while_reading_changes_nothing(world: World) -> None:
    p, d = world.pair()
    world.stuck_in_flight(p, d)
    world.network.cut(d)
    world.data.land(world.data.in_flight[0])
    world.settle()
    assert d.ended == GOOD
