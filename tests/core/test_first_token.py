"""The first token of the answer comes with the prompt, to who wants it, and never before all of the prompt."""

from core.process import Process
from core.world import World

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome

TOKEN = 4711


def test_token_comes_with_a_prompt_that_is_handed_over_whole(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    d.receive(key, p, 10, wants_token=True)
    p.announce(key)
    p.sampled(key, TOKEN)
    p.final(key, 10)
    world.settle(within=0.1)
    assert (d.received[key].outcome, d.received[key].token) == (Outcome.DELIVERED, TOKEN)
    assert len(world.data.writes) == 1


def test_receiver_that_wants_the_token_waits_for_it_though_all_is_written(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    key = world.key()
    d.receive(key, p, 10, wants_token=True)
    world.run(0.1)
    p.final(key, 10)
    world.run(3 * world.config.lease_s)
    assert key not in d.received

    p.sampled(key, TOKEN)
    world.settle(within=0.1)
    assert d.received[key].token == TOKEN
    assert [write.post.plan.descriptors > 0 for write in world.data.writes] == [True, False]


def test_receiver_that_wants_the_token_goes_on_without_when_there_will_be_none(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    key = world.key()
    d.receive(key, p, 10, wants_token=True)
    world.run(0.1)
    p.final(key, 10)
    p.sampled(key, None)
    world.settle(within=0.1)
    assert (d.received[key].outcome, d.received[key].token) == (Outcome.DELIVERED, None)


def test_receiver_that_does_not_want_the_token_neither_waits_for_it_nor_gets_it(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    early, late = world.keys(2)
    d.receive(early, p, 10)
    d.receive(late, p, 10)
    world.run(0.1)
    p.final(early, 10)
    p.announce(late)
    p.sampled(late, TOKEN)
    p.final(late, 10)
    world.settle(within=0.1)
    p.sampled(early, TOKEN)
    world.settle(within=0.1)
    assert [d.received[key].token for key in (early, late)] == [None, None]


def test_token_of_a_prompt_that_failed_is_not_given(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 10, wants_token=True)
    p.announce(key)
    p.sampled(key, TOKEN)
    p.final(key, 10)
    world.run(0.1)
    d.abort(key)
    world.data.land(world.data.in_flight[0])
    world.settle(within=1.0)
    assert (d.received[key].reason, d.received[key].token) == (Reason.ABORTED, None)


def test_prompt_that_was_preempted_after_it_was_complete_still_brings_its_token(
    world: World, pair: tuple[Process, Process]
) -> None:
    """Its blocks are pinned, and the token is sampled when it has been computed again."""
    p, d = pair
    key = world.key()
    d.receive(key, p, 10, wants_token=True)
    world.run(0.1)
    p.final(key, 10, last=False)
    p.preempt(key)
    world.run(1.0)
    p.final(key, 10)
    p.sampled(key, TOKEN)
    world.settle(within=0.1)
    assert d.received[key].token == TOKEN
