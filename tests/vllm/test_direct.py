"""What a scheduler tells the transfer threads, and hears from them, before the step that brings the same."""

from collections.abc import Iterator

import pytest
from engines.scheduler_rig import Overlap, Ranks, SchedulerRig, computed, key_of, receiving, reported, sending
from vllm.v1.request import RequestStatus

from kvpush.core.commands import Announce, Begin, Command, Expect, Final, Receive, Sampled, Watch
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, PrefillBegun, ReceiveEnded
from kvpush.core.ids import RequestId
from kvpush.vllm.first_token_scheduler import FirstTokenScheduler
from kvpush.vllm.metadata import RankReport, StepCommands
from kvpush.vllm.settings import Push

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=Overlap)
def ranks(tiny: str, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    rig = SchedulerRig(tiny, overlap=request.param, reserve_early=0.5, scheduler=FirstTokenScheduler)
    made = Ranks(rig)
    yield made
    made.close()


def delivered(token: int | None = None) -> ReceiveEnded:
    return ReceiveEnded(key_of(1), RequestId("a"), Outcome.DELIVERED, Reason.OK, token=token)


def test_blocks_are_set_aside_in_the_step_after_the_prefill_has_begun(ranks: Ranks) -> None:
    rig = ranks.rig
    rig.add("a", 40, receiving(1))
    rig.step()
    assert not rig.taken(Receive)
    ranks.say(PrefillBegun(key_of(1), RequestId("a")), ranks=1)
    rig.step()
    assert rig.taken(Receive)


def test_request_goes_on_when_all_ranks_have_it_and_what_comes_with_the_step_changes_nothing(ranks: Ranks) -> None:
    rig = ranks.rig
    rig.add("a", 40, receiving(1), max_tokens=4)
    ranks.say(PrefillBegun(key_of(1), RequestId("a")), ranks=1)
    rig.step()
    ranks.say(delivered(token=77), ranks=1)
    rig.step()
    assert not rig.emitted

    ranks.threads[1].send([delivered(token=77)])
    rig.step()
    assert rig.emitted == {"a": [77]}
    rig.step(reported(received=["a"], more=RankReport(tokens=(("a", 77),))))
    for _ in range(6):
        rig.step()
    assert len(rig.emitted["a"]) == 4
    assert rig.emitted["a"].count(77) == 1
    assert rig.free_blocks == rig.free_at_start


def test_word_that_comes_after_the_request_has_gone_is_ignored(ranks: Ranks) -> None:
    rig = ranks.rig
    ranks.say(delivered(), PrefillBegun(key_of(1), RequestId("a")))
    rig.step()
    assert rig.connector._scheduling.open_requests == 0
    assert not rig.emitted


def heard(ranks: Ranks) -> list[Command]:
    """What the first rank's transfer thread has been told directly since it was last asked."""
    return ranks.threads[0].take()


def test_ranks_are_told_of_a_request_at_once_and_the_step_says_what_they_have(ranks: Ranks) -> None:
    rig = ranks.rig
    rig.add("a", 40, receiving(1))
    assert [type(each) for each in heard(ranks)] == [Expect]
    ranks.threads[1].take()
    ranks.threads[1].close()
    rig.add("b", 40, sending(2))
    step = rig.step().kv_connector_metadata

    assert isinstance(step, StepCommands)
    assert [type(each) for each in step.commands] == [Expect, Announce, Watch, Begin]
    assert step.heard == (frozenset({0, 1}), *[frozenset({0})] * 3)
    assert step.unheard(0) == []
    assert step.unheard(1) == list(step.commands[1:])
    assert heard(ranks)[:3] == list(step.commands[1:])


def test_prompt_pushed_step_by_step_is_told_of_with_steps_from_its_first_tokens_on(tiny: str) -> None:
    ranks = Ranks(SchedulerRig(tiny, push=Push.PROGRESSIVE, batched_tokens=32))
    ranks.rig.add("a", 80, sending(1))
    assert [type(each) for each in heard(ranks)] == [Announce]
    for _ in range(3):
        ranks.rig.step()
    assert [type(each) for each in heard(ranks)] == []
    ranks.rig.step()
    finals, rest = ranks.rig.taken(Final), ranks.rig.taken(Sampled)
    assert ([final.tokens for final in finals], len(rest)) == ([32, 64, 80], 1)
    ranks.close()


def test_blocks_that_a_running_step_writes_to_are_not_registered_before_it_has_ended(tiny: str) -> None:
    """R12: the way that a registration takes is quicker than a step."""
    ranks = Ranks(SchedulerRig(tiny, overlap=Overlap.ASYNC))
    rig = ranks.rig
    rig.add("b", 640, None, max_tokens=9)
    running = rig.scheduler.schedule()
    written = set(running.scheduled_new_reqs[0].block_ids[0])
    results = computed(running, rig.scheduler.requests)
    rig.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    rig.add("a", 640, receiving(1))
    assert len(written) + 40 > rig.free_at_start, "the one needs what the other has"

    while_it_runs = rig.scheduler.schedule()
    told = [each for each in heard(ranks) if isinstance(each, Receive)]
    rig.scheduler.update_from_output(running, results)
    rig.scheduler.update_from_output(while_it_runs, computed(while_it_runs, {}))
    rig.step()
    (receive,) = [each for each in heard(ranks) if isinstance(each, Receive)]

    assert not told
    assert written & set(receive.blocks[0])
    ranks.close()


def test_blocks_that_are_free_are_registered_while_a_step_runs(tiny: str) -> None:
    ranks = Ranks(SchedulerRig(tiny, overlap=Overlap.ASYNC))
    rig = ranks.rig
    rig.add("b", 320, None, max_tokens=9)
    running = rig.scheduler.schedule()
    written = set(running.scheduled_new_reqs[0].block_ids[0])
    rig.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    rig.add("a", 320, receiving(1))
    rig.scheduler.schedule()

    (receive,) = [each for each in heard(ranks) if isinstance(each, Receive)]
    assert not written & set(receive.blocks[0])
    ranks.close()
