"""A prompt's KV reaches the receiver, whatever comes first and whatever is lost, late or doubled on the way."""

import pytest
from core.faults import first, lose
from core.memory import make_layout
from core.network import LOST, Fate
from core.world import World

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.ids import Epoch
from kvpush.core.messages import Accepted, Hello, Message, Register, Welcome, Writing, Written, encode_notice


def test_receiver_gets_the_prompt_when_it_registers_before_the_prompt_is_final(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    p.announce(key)
    d.receive(key, p, tokens=10)
    world.run(0.5)
    p.final(key, 10)
    world.settle(within=0.2)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_receiver_gets_the_prompt_when_it_registers_after_the_prompt_is_final(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    p.announce(key)
    p.final(key, 10)
    world.run(0.5)
    d.receive(key, p, tokens=10)
    world.settle(within=0.2)
    assert d.received[key].reason is Reason.OK


def test_receiver_gets_the_prompt_when_the_prompt_was_never_announced_but_is_final(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, tokens=10)
    world.run(1.0)
    p.final(key, 10)
    world.settle(within=0.2)
    assert d.received[key].outcome is Outcome.DELIVERED


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9])
def test_receiver_gets_prompts_shorter_and_longer_than_a_block(world: World, tokens: int) -> None:
    """B10: with blocks of 4 tokens, whatever the last one holds."""
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, tokens)
    p.final(key, tokens)
    world.settle(within=0.2)
    assert d.received[key].outcome is Outcome.DELIVERED


@pytest.mark.parametrize(("sender_block", "receiver_block"), [(4, 4), (4, 8), (8, 4), (2, 8)])
@pytest.mark.parametrize("start", range(0, 20, 3))
def test_receiver_gets_only_the_suffix_it_asks_for(
    world: World, start: int, sender_block: int, receiver_block: int
) -> None:
    """B24: positions, not counts (R8), for any block sizes."""
    p = world.start("p", make_layout(0, sender_block))
    d = world.start("d", make_layout(1, receiver_block))
    key = world.key()
    command = d.receive(key, p, 21, start)
    p.final(key, 21)
    world.settle(within=0.2)
    assert d.received[key].outcome is Outcome.DELIVERED
    assert d.records[-1].tokens == command.span.tokens == 21 - start


def test_many_prompts_arrive_side_by_side(world: World) -> None:
    p, d = world.pair()
    keys = world.keys(8)
    for i, key in enumerate(keys):
        p.announce(key)
        if i % 2:
            p.final(key, 5 + i)
        d.receive(key, p, 5 + i)
    world.run(0.1)
    for i, key in enumerate(keys):
        if not i % 2:
            p.final(key, 5 + i)
    world.settle(within=0.2)
    assert {d.received[key].outcome for key in keys} == {Outcome.DELIVERED}
    assert sorted(p.free) == sorted(d.free) == list(range(64))


def test_sender_frees_its_source_as_soon_as_the_writes_are_done(world: World) -> None:
    """B04: success frees the source; no lease has to run out, no answer of the receiver is needed."""
    p, d = world.pair()
    world.hand_over(p, d)
    assert world.run_until(lambda: not p.sources) < 0.1
    assert p.records[-1].outcome is Outcome.DELIVERED


# chunks ---------------------------------------------------------------------------------------------------
def test_prompt_is_written_as_its_chunks_become_final(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 22)
    p.announce(key)
    for tokens in (6, 14, 20):
        p.final(key, tokens, last=False)
        world.run(0.1)
    assert [write.in_flight for write in world.data.writes] == [False] * 3
    p.final(key, 22)
    world.settle(within=0.2)
    assert d.received[key].outcome is Outcome.DELIVERED
    assert len(world.data.writes) == 4


def test_several_parts_are_in_flight_at_once_and_land_in_any_order(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 22)
    for tokens in (6, 14, 20):
        p.final(key, tokens, last=False)
        world.run(0.01)
    p.final(key, 22)
    world.run(0.01)
    for write in reversed(world.data.in_flight):
        assert key not in d.received
        world.data.land(write)
        world.run(0.001)
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_chunk_that_completes_no_block_is_not_written_yet(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 10)
    world.run(0.1)
    p.final(key, 3, last=False)
    world.run(0.1)
    assert not world.data.writes


def test_registration_ends_before_the_prompt_does(world: World) -> None:
    """The receiver computes the rest itself. Its part is written before the prompt is complete, but called complete
    only when the blocks cannot be used for anything else any more."""
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 8)
    world.run(0.1)
    p.final(key, 9, last=False)
    world.run(1.0)
    assert world.data.writes
    assert key not in d.received
    p.final(key, 30)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED


def test_receiver_of_more_tokens_than_the_prompt_has_is_refused_at_once(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    d.receive(key, p, 12)
    world.run(0.1)
    p.final(key, 10)
    assert world.settle(within=0.1) < 0.1
    assert d.received[key].reason is Reason.SPAN_NOT_COVERED
    assert "10 tokens" in d.received[key].detail
    assert not world.data.writes


# lost, late, doubled --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [Hello, Welcome, Register, Accepted, Writing, Written])
@pytest.mark.parametrize("fate", [LOST, Fate(copies=2), Fate(delay_s=0.4)], ids=["lost", "doubled", "late"])
def test_prompt_arrives_when_one_frame_is_lost_or_late_or_doubled(
    world: World, kind: type[Message], fate: Fate
) -> None:
    world.judge(first(kind, fate))
    p, d = world.pair()
    key = world.hand_over(p, d)
    world.settle(within=3.0)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_registration_repeated_after_delivery_does_not_fail_the_transfer(world: World) -> None:
    """The sender's words are slow; what it says to the second registration comes before the notice does."""
    world.judge(first(Accepted, Fate(delay_s=world.config.retry_s + 0.1)))
    p, d = world.pair()
    key = world.key()
    world.data.notice_delay = lambda _: 1.0
    p.final(key, 10)
    d.receive(key, p, 10)
    world.settle(within=2.0)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_hint_before_the_notice_waits_for_it(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    world.data.notice_delay = lambda _: 1.0
    d.receive(key, p, 10)
    p.final(key, 10)
    world.run_until(lambda: not p.sources)
    assert key not in d.received
    assert d.endpoint.notices_due == 1
    world.settle(within=1.1)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_hint_before_the_notice_waits_for_it_though_the_registration_was_not_answered(world: World) -> None:
    """Repeating the registration is not what the notice's grace ends with."""
    world.judge(lose(Accepted))
    p, d = world.pair()
    key = world.key()
    world.data.notice_delay = lambda _: 1.5
    p.final(key, 10)
    d.receive(key, p, 10)
    world.settle(within=1.6)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_notice_before_the_hint_is_enough(world: World) -> None:
    world.judge(lose(Written, Writing))
    p, d = world.pair()
    key = world.hand_over(p, d)
    world.settle(within=0.1)
    assert d.received[key].outcome is Outcome.DELIVERED


def test_receive_fails_soon_when_its_notice_is_lost(world: World) -> None:
    p, d = world.pair()
    key = world.key()
    world.data.notice_delay = lambda _: None
    d.receive(key, p, 10)
    p.final(key, 10)
    took = world.settle()
    assert d.received[key].reason is Reason.NOTICE_LOST
    assert world.config.notice_grace_s < took < world.config.notice_grace_s + 0.2


def test_receive_fails_soon_when_notice_and_hint_are_lost(world: World) -> None:
    """The next heartbeat tells what the hint would have."""
    world.judge(lose(Written))
    p, d = world.pair()
    key = world.key()
    world.data.notice_delay = lambda _: None
    d.receive(key, p, 10)
    p.final(key, 10)
    took = world.settle()
    assert d.received[key].reason is Reason.NOTICE_LOST
    assert took < world.config.notice_grace_s + world.config.heartbeat_s + 0.2


def test_notice_that_comes_twice_is_counted_and_ignored(world: World) -> None:
    p, d = world.pair()
    key = world.hand_over(p, d)
    world.run_until(lambda: key in d.received)
    notice = world.data.writes[0].notice
    d.input(lambda now: d.endpoint.notice_received(notice, now))
    world.settle()
    assert d.counted["late_notice", Reason.RETIRED_TRANSFER] == 1
    assert len(d.records) == 1


def test_parts_are_complete_only_when_each_of_them_was_noticed(world: World) -> None:
    """R6: as many notices as there are parts are not enough, if they are not those of the parts."""
    p, d = world.pair()
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 10)
    world.run(0.1)
    p.final(key, 8, last=False)
    p.final(key, 10)
    stray = encode_notice(Epoch(1000 + d.number), key, part=5, parts=0)
    d.input(lambda now: d.endpoint.notice_received(stray, now))
    world.data.land(world.data.in_flight[1])
    world.run(0.1)
    assert key not in d.received
    world.data.land(world.data.in_flight[0])
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED
