"""Finished prompts that are kept for another turn: asked for, received, taken back, forgotten."""

import pytest
from core.faults import first
from core.process import Process
from core.world import World

from kvpush.core.digests import Digests, digests_of
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, Purpose, Role
from kvpush.core.ids import Key
from kvpush.core.messages import Ask
from kvpush.core.mode import ModeSetting

HELD = tuple(range(45))
KEPT = digests_of(HELD)


@pytest.fixture(params=[ModeSetting.PUSH, ModeSetting.PULL])
def world(request: pytest.FixtureRequest) -> World:
    return World(mode=request.param)


def asked(world: World, p: Process, d: Process, key: Key, digests: Digests) -> int:
    """What `p` finds when it asks `d`."""
    p.inquire(key, d, digests)
    world.run_until(lambda: key in p.found)
    return p.found[key]


def ending_of(process: Process, key: Key, role: Role) -> tuple[Outcome, Reason]:
    (record,) = (each for each in process.records if each.key == key and each.role is role)
    return record.outcome, record.reason


# found ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "common"),
    [
        ((*HELD, 99, 98), 32),
        ((*HELD[:31], 99, *HELD[32:]), 16),
        ((99, *HELD[1:]), 0),
        (HELD[:15], 0),
        (HELD[:16], 16),
    ],
    ids=["goes on", "differs in the second granule", "differs at once", "too short", "one granule"],
)
def test_peer_finds_the_tokens_that_are_the_same_to_within_a_granule(
    world: World, prompt: tuple[int, ...], common: int
) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    assert asked(world, p, d, key, digests_of(prompt)) == common
    p.abort(key, Reason.NOT_NEEDED)
    world.settle()
    assert key not in d.sources


def test_prompt_that_is_kept_is_received_as_any_other(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    tokens = asked(world, p, d, key, KEPT)
    p.receive(key, d, tokens, start=8)
    world.settle()

    assert p.received[key].outcome is Outcome.DELIVERED
    (record,) = p.records
    assert (record.purpose, record.tokens) == (Purpose.CONVERSATION, 24)
    assert ending_of(d, key, Role.SENDER) == (Outcome.DELIVERED, Reason.OK)


def test_two_engines_send_and_receive_at_once_in_both_directions(world: World) -> None:
    p, d = world.pair()
    forth, back = world.key(), world.key()
    d.keep(back, 45, KEPT)
    p.announce(forth)
    d.receive(forth, p, 40)
    p.receive(back, d, asked(world, p, d, back, KEPT))
    p.final(forth, 40)
    world.settle()
    assert p.received[back].outcome is d.received[forth].outcome is Outcome.DELIVERED


# not found --------------------------------------------------------------------------------------------------
def test_key_that_is_not_known_is_answered_at_once_and_leaves_nothing(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    began = world.now
    assert asked(world, p, d, key, KEPT) == 0
    assert world.now - began < 0.1
    assert not d.records
    p.abort(key, Reason.NOT_NEEDED)
    world.settle()


def test_restarted_engine_knows_nothing_of_what_it_kept(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    world.run(1.0)
    assert asked(world, p, world.restart(d), key, KEPT) == 0


def test_engine_that_is_gone_costs_a_prompt_no_more_than_the_time_for_inquiries(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    d.kill()
    p.inquire(key, d, KEPT)
    took = world.run_until(lambda: key in p.found)
    assert p.found[key] == 0
    assert took == pytest.approx(world.config.inquiry_s)
    assert p.counted["inquiry_unanswered", Reason.PEER_SILENT] == 1


def test_question_that_was_lost_is_asked_again(world: World) -> None:
    p, d = world.pair()
    key, unknown = world.key(), world.key()
    d.keep(key, 45, KEPT)
    assert asked(world, p, d, unknown, KEPT) == 0
    world.judge(first(Ask))
    assert asked(world, p, d, key, KEPT) == 32


def test_key_that_has_served_finds_nothing_more(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    assert asked(world, p, d, key, KEPT) == 32
    p.abort(key, Reason.NOT_NEEDED)
    world.settle()
    p.found.pop(key)

    p.inquire(key, d, KEPT)
    assert p.found[key] == 0
    assert p.counts("local_error") == 2, "neither expected nor asked about again"


def test_prompt_nobody_asks_for_is_let_go(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT, keep_s=20.0)
    world.run(19.9)
    assert key in d.sources
    world.run(0.2)
    assert key not in d.sources
    assert ending_of(d, key, Role.SENDER) == (Outcome.FAILED, Reason.NOT_ASKED_FOR)
    assert asked(world, p, d, key, KEPT) == 0


def test_prompt_that_was_found_is_kept_while_its_request_waits_for_blocks(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT, keep_s=1.0)
    assert asked(world, p, d, key, KEPT) == 32
    world.run(300.0)
    p.receive(key, d, 32)
    world.settle()
    assert p.received[key].outcome is Outcome.DELIVERED


def test_question_that_is_faster_than_the_engine_waits_for_the_answer(world: World) -> None:
    p, d = world.pair()
    key, other = world.key(), world.key()
    for each in (key, other):
        d.promise(each)
        p.inquire(each, d, KEPT)
    world.run(0.3)
    assert not p.found
    d.keep(key, 45, KEPT)
    d.release(other)
    world.run(0.1)
    assert p.found == {key: 32, other: 0}


def test_promise_that_is_kept_too_late_costs_no_more_than_the_time_for_inquiries(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.promise(key)
    p.inquire(key, d, KEPT)
    world.run(world.config.inquiry_s + 0.1)
    assert p.found == {key: 0}
    p.abort(key, Reason.NOT_NEEDED)
    world.run(1.0)
    d.keep(key, 45, KEPT, keep_s=5.0)
    world.run(6.0)
    assert key not in d.sources


# taken back -------------------------------------------------------------------------------------------------
def test_engine_gets_its_blocks_back_at_once_when_it_needs_them(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    d.release(key)
    assert key not in d.sources
    assert ending_of(d, key, Role.SENDER) == (Outcome.FAILED, Reason.EVICTED)
    assert asked(world, p, d, key, KEPT) == 0


def test_prompt_that_is_taken_back_after_it_was_found_fails_when_it_is_asked_for(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    assert asked(world, p, d, key, KEPT) == 32
    d.release(key)
    p.receive(key, d, 32)
    world.settle()
    assert (p.received[key].outcome, p.received[key].reason) == (Outcome.FAILED, Reason.EVICTED)


def test_release_of_what_is_being_sent_waits_for_its_writes(world: World) -> None:
    """The oracle sees to it that the source is not given back while it is read."""
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    p.receive(key, d, asked(world, p, d, key, KEPT))
    world.run_until(lambda: world.data.in_flight)
    d.release(key)
    world.settle()
    assert p.received[key].outcome is Outcome.DELIVERED
    assert key not in d.sources


def test_stopping_engine_keeps_nothing_and_answers_every_question(world: World) -> None:
    p, d = world.pair()
    key, other = world.key(), world.key()
    d.keep(key, 45, KEPT)
    d.inquire(other, p, KEPT)
    d.stop()
    world.run_until(lambda: d.stopped)
    assert key not in d.sources
    assert d.found[other] == 0


# tokens that were not compared ------------------------------------------------------------------------------
@pytest.mark.parametrize("ask_first", [KEPT[:16], None], ids=["one granule compared", "nothing compared"])
def test_registration_for_tokens_that_were_not_compared_gets_nothing(world: World, ask_first: Digests | None) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    if ask_first is not None:
        assert asked(world, p, d, key, ask_first) == 16
    p.receive(key, d, 32)
    world.settle()
    assert (p.received[key].outcome, p.received[key].reason) == (Outcome.FAILED, Reason.SPAN_NOT_COVERED)
    assert not world.data.writes
    assert key not in d.sources


def test_registration_from_before_there_was_anything_to_compare_gets_nothing(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    p.receive(key, d, 32)
    world.run(1.0)
    d.keep(key, 45, KEPT, keep_s=5.0)
    world.run(60.0)
    world.settle()
    assert p.received[key].outcome is Outcome.FAILED
    assert not world.data.writes
    assert key not in d.sources


def test_second_engine_that_found_the_same_prompt_is_refused(world: World) -> None:
    p, d = world.pair()
    q = world.start("q")
    key = world.key()
    d.keep(key, 45, KEPT)
    for engine in (p, q):
        assert asked(world, engine, d, key, KEPT) == 32
    for engine in (p, q):
        engine.receive(key, d, 32)
    world.settle()
    assert sorted(engine.received[key].outcome for engine in (p, q)) == [Outcome.DELIVERED, Outcome.FAILED]


def test_key_that_is_used_twice_keeps_the_first_prompt_and_frees_the_second(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.keep(key, 45, KEPT)
    sources = d.sources[key]
    d.keep(key, 8, Digests(b""))
    assert any("kept already" in refusal for refusal in world.oracle.refused)
    d.sources[key] = sources
    assert asked(world, p, d, key, KEPT) == 32
