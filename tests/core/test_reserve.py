"""Blocks are set aside when the sender has begun: a receiver asks, and hears of it, whatever gets lost."""

import pytest
from core.faults import first, listen
from core.process import Process
from core.world import World

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.ids import Key
from kvpush.core.messages import Begun, Interest, Message


def watch(d: Process, p: Process) -> Key:
    """A receiver that waits for a prompt to begin."""
    key = d.world.key()
    d.expect(key, p)
    d.watch(key)
    d.world.run(0.1)
    return key


def test_receiver_hears_of_a_prompt_when_it_begins_and_not_before(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = watch(d, p)
    p.announce(key)
    world.run(1.0)
    assert not d.begun

    p.begin(key)
    assert world.run_until(lambda: d.begun == [key]) < 0.01
    d.receive(key, p, 10)
    p.final(key, 10)
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.DELIVERED
    assert d.begun == [key]


@pytest.mark.parametrize("how", ["begun", "final"])
def test_receiver_that_asks_late_hears_at_once(world: World, pair: tuple[Process, Process], how: str) -> None:
    p, d = pair
    key = world.key()
    p.announce(key)
    p.begin(key) if how == "begun" else p.final(key, 10)
    d.expect(key, p)
    d.watch(key)
    assert world.run_until(lambda: d.begun == [key]) < 0.02
    d.abort(key)
    world.settle(within=0.1)


@pytest.mark.parametrize("kind", [Interest, Begun])
def test_question_or_answer_that_is_lost_is_repeated(
    world: World, pair: tuple[Process, Process], kind: type[Message]
) -> None:
    p, d = pair
    world.judge(first(kind))
    key = watch(d, p)
    p.announce(key)
    p.begin(key)
    assert 1.0 < world.run_until(lambda: d.begun == [key]) < 1.1 * world.config.heartbeat_s
    d.abort(key)
    world.settle(within=0.1)


def test_receiver_hears_of_a_prompt_that_will_never_begin(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = watch(d, p)
    p.announce(key)
    p.withdraw(key)
    assert world.run_until(lambda: d.begun == [key]) < 0.01
    d.receive(key, p, 10)
    assert d.received[key].reason is Reason.PREFILL_ABORTED
    world.settle(within=0.1)


def test_receiver_hears_when_no_prompt_with_its_key_ever_comes(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = watch(d, p)
    assert world.run_until(lambda: d.begun == [key], within=11.0) == pytest.approx(world.config.unannounced_s, abs=0.2)
    d.receive(key, p, 10)
    assert d.received[key].reason is Reason.NEVER_ANNOUNCED
    world.settle(within=0.1)


def test_receiver_hears_when_its_sender_is_gone(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = watch(d, p)
    p.kill()
    world.run_until(lambda: d.begun == [key])
    d.receive(key, p, 10)
    assert d.received[key].reason is Reason.PEER_LOST
    world.settle()


def test_sender_forgets_who_watched_and_is_gone(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    unheard = watch(d, p)
    known = watch(d, p)
    p.announce(known)
    d.kill()
    world.run(world.config.doubt_s + 0.1)
    p.begin(known)
    p.final(known, 10)
    world.settle()
    assert {record.key: record.reason for record in p.records} == {
        unheard: Reason.PEER_LOST,
        known: Reason.LEASE_EXPIRED,
    }


def test_sender_that_stops_says_so_to_who_watches(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = watch(d, p)
    p.stop()
    assert world.run_until(lambda: d.begun == [key]) < 0.01
    d.receive(key, p, 10)
    assert d.received[key].reason is Reason.SHUTDOWN
    world.settle()


def test_abort_while_waiting_drops_the_prompt(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = watch(d, p)
    d.abort(key)
    world.settle(within=0.1)
    p.announce(key)
    p.final(key, 10)
    world.settle(within=0.1)
    assert not d.begun
    assert not world.data.writes


def test_blocks_that_come_while_waiting_are_registered_at_once(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    said: list[Message] = []
    world.judge(listen(said, Begun))
    key = watch(d, p)
    d.receive(key, p, 10)
    world.run(0.1)
    p.announce(key)
    p.begin(key)
    p.final(key, 10)
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.DELIVERED
    assert not said


def test_watching_a_key_that_is_not_expected_is_refused_and_answered(
    world: World, pair: tuple[Process, Process]
) -> None:
    _, d = pair
    key = world.key()
    d.watch(key)
    assert d.begun == [key]
    assert d.counts("local_error") == 1
    assert world.oracle.refused
