"""vLLM's real scheduler, and prompts that are handed over step by step: what is final, pinned, retracted and freed."""

import pytest
from engines.scheduler_rig import BLOCK, Overlap, SchedulerRig, key_of, reported, sending
from vllm.v1.request import RequestStatus

from kvpush.core.commands import Final, Retract, Withdraw
from kvpush.core.errors import Reason
from kvpush.vllm.settings import Push

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=list(Overlap), ids=lambda overlap: overlap.name.lower())
def rig(tiny: str, request: pytest.FixtureRequest) -> SchedulerRig:
    """Prompts are cut into chunks of 32 tokens."""
    return SchedulerRig(tiny, overlap=request.param, push=Push.PROGRESSIVE, batched_tokens=32)


def handed(rig: SchedulerRig) -> list[tuple[int, bool]]:
    """Tokens and `last` of what was handed over."""
    return [(final.tokens, final.last) for final in rig.taken(Final)]


def assert_all_free(rig: SchedulerRig) -> None:
    assert rig.free_blocks == rig.free_at_start
    assert not rig.scheduler.requests
    assert rig.connector._scheduling.open_requests == 0
    assert not rig.connector.has_pending_push_work()


def test_sender_hands_over_each_chunk_with_the_step_that_computes_it(rig: SchedulerRig) -> None:
    rig.add("a", 80, sending(1))
    for tokens in (32, 64, 80):
        rig.step()
        assert handed(rig)[-1] == (tokens, tokens == 80)

    assert [len(final.blocks[0]) for final in rig.taken(Final)] == [2, 4, 5]
    assert len({final.blocks[0][:2] for final in rig.taken(Final)}) == 1
    rig.step()
    assert rig.free_blocks == rig.free_at_start - 5, "the blocks wait until they are sent"
    rig.step(reported(sent=["a"]))
    assert_all_free(rig)


def test_chunk_counts_what_the_prefix_cache_has_as_final(rig: SchedulerRig) -> None:
    rig.add("a#warm", 33, None)
    while rig.scheduler.requests:
        rig.step()
    rig.add("a#cold", 70, sending(1))
    rig.step()

    assert handed(rig) == [(64, False)]


def test_sender_hands_a_prompt_over_once_however_much_it_generates(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, sending(1), max_tokens=20)
    while not request.is_finished():
        rig.step()
    rig.step(reported(sent=["a"]))

    assert handed(rig) == [(32, False), (40, True)]
    assert_all_free(rig)


def test_prompt_sent_before_its_request_has_finished_is_not_waited_for(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, sending(1), max_tokens=4)
    rig.step()
    rig.step(reported(sent=["a"]))
    while not request.is_finished():
        rig.step(reported(sent=["a"]))
    rig.step()

    assert_all_free(rig)


@pytest.mark.parametrize(("steps", "handed_over"), [(0, False), (1, True)])
def test_prompt_aborted_between_chunks_is_withdrawn_and_freed_when_its_writes_have_stopped(
    rig: SchedulerRig, steps: int, *, handed_over: bool
) -> None:
    rig.add("a", 80, sending(1))
    for _ in range(steps):
        rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step()

    assert [each.reason for each in rig.taken(Withdraw)] == [Reason.PREFILL_ABORTED]
    assert (rig.free_blocks < rig.free_at_start) is handed_over
    rig.step(reported(sent=["a"]))
    assert_all_free(rig)


def test_complete_prompt_whose_request_is_aborted_is_sent_and_kept_until_then(rig: SchedulerRig) -> None:
    rig.add("a", 40, sending(1), max_tokens=9)
    rig.step()
    rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step()

    assert not rig.taken(Withdraw)
    assert rig.free_blocks == rig.free_at_start - 3
    rig.step(reported(sent=["a"]))
    assert_all_free(rig)


# preemption -----------------------------------------------------------------------------------------------
def preempt(rig: SchedulerRig) -> None:
    """What a step does that runs short of blocks."""
    while rig.scheduler.running:
        rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    rig.scheduler.prev_step_scheduled_req_ids.clear()


def test_prompt_preempted_between_chunks_is_retracted_and_handed_over_again(rig: SchedulerRig) -> None:
    rig.add("a", 80, sending(1))
    rig.step()
    rig.step()
    preempt(rig)
    while (80, True) not in handed(rig):
        rig.step()
    rig.step()

    assert [each.key for each in rig.taken(Retract)] == [key_of(1)]
    again = rig.commands[rig.commands.index(rig.taken(Retract)[0]) :]
    assert [final.tokens for final in again if isinstance(final, Final)] == [80], "the prefix cache has the rest"
    assert len(rig.taken(Final)[-1].blocks[0]) == 5
    rig.step(reported(sent=["a"]))
    assert_all_free(rig)


def test_complete_prompt_that_is_preempted_stays_in_its_blocks_until_it_is_sent(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, sending(1), max_tokens=4)
    rig.step()
    rig.step()
    pinned = set(rig.taken(Final)[-1].blocks[0])
    preempt(rig)
    other = rig.add("b", 16 * (rig.free_blocks - 3) - 1, None)
    while not (request.is_finished() and other.is_finished()):
        for each in rig.step().scheduled_new_reqs:
            assert each.req_id != "b" or not pinned & set(each.block_ids[0]), "a pinned block was handed out"
    rig.step()

    assert not rig.taken(Retract)
    assert handed(rig) == [(32, False), (40, True)]
    assert rig.free_blocks == rig.free_at_start - 3
    assert rig.connector.has_pending_push_work(), "nobody else asks the workers whether the blocks are sent"
    rig.step(reported(sent=["a"]))
    assert_all_free(rig)


def test_short_pool_preempts_senders_and_loses_no_block(rig: SchedulerRig) -> None:
    """Prompts and answers that do not fit at once: vLLM preempts by itself."""
    requests = [rig.add(f"r{i}", 16 * BLOCK, sending(i), max_tokens=120) for i in range(5)]
    for _ in range(5000):
        report = [request.request_id for request in requests if request.is_finished()]
        rig.step(reported(sent=report))
        if not rig.scheduler.requests:
            break
    rig.step(reported(sent=[request.request_id for request in requests]))

    assert any(request.num_preemptions for request in requests), "the pool was not short"
    lasts = [final.key for final in rig.taken(Final) if final.last]
    assert sorted(lasts) == sorted(key_of(i) for i in range(5))
    assert_all_free(rig)
