"""vLLM's real scheduler, and finished requests that are kept for another turn: what is kept, bounded, given back."""

import pytest
from engines.scheduler_rig import BLOCKS, Overlap, SchedulerRig, key_of, receiving, reported
from vllm.v1.request import Request, RequestStatus

from kvpush.core.commands import Keep, Promise, Release
from kvpush.core.digests import digests_of
from kvpush.vllm.tokens import prompt_digests

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=list(Overlap), ids=lambda overlap: overlap.name.lower())
def rig(tiny: str, request: pytest.FixtureRequest) -> SchedulerRig:
    """It may keep half of its 64 blocks."""
    return SchedulerRig(tiny, overlap=request.param, keep_share=0.5, keep_s=60.0)


def finish(rig: SchedulerRig, name: str, tokens: int, number: int, max_tokens: int = 1) -> Request:
    """A request that receives its prompt, decodes, and is kept."""
    request = rig.add(name, tokens, receiving(number, keep=100 + number), max_tokens=max_tokens)
    rig.step()
    rig.step(reported(received=[name]))
    while not request.is_finished():
        rig.step()
    rig.step()
    return request


def released(rig: SchedulerRig) -> list[int]:
    """The keys that were asked back, as numbers."""
    return [int(release.key.transfer_id, 16) - 100 for release in rig.taken(Release)]


def test_finished_request_is_kept_with_all_that_went_through_the_model(rig: SchedulerRig) -> None:
    request = finish(rig, "a", 40, 1, max_tokens=10)

    (keep,) = rig.taken(Keep)
    assert (keep.key, keep.tokens, keep.keep_s) == (key_of(101), 48, 60.0)
    assert keep.digests == digests_of(list(request.all_token_ids)[:48], b"\0")
    assert rig.free_blocks == rig.free_at_start - 3
    assert not rig.scheduler.has_requests(), "what is kept gives an engine nothing to do"
    rig.step(reported(sent=["a"]))
    assert rig.free_blocks == rig.free_at_start


def test_next_turn_finds_the_blocks_in_the_engines_own_cache(rig: SchedulerRig) -> None:
    finish(rig, "a", 40, 1)
    rig.add("a#again", 48, None)
    assert rig.step().num_scheduled_tokens == {"a#again": 16}


@pytest.mark.parametrize("how", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_request_that_did_not_end_well_is_not_kept(rig: SchedulerRig, how: RequestStatus) -> None:
    rig.add("a", 40, receiving(1, keep=101), max_tokens=10)
    rig.step()
    rig.step(reported(received=["a"]))
    rig.step()
    rig.scheduler.finish_requests("a", how)
    rig.step()
    rig.step()
    assert not rig.taken(Keep)
    assert rig.free_blocks == rig.free_at_start


def test_who_asks_too_early_is_told_what_is_to_come(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1, keep=101))
    rig.step()
    assert rig.taken(Promise) == [Promise(key_of(101))]
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step()
    assert rig.taken(Release) == [Release(key_of(101))], "nothing is to come after all"


def test_oldest_makes_room_when_the_share_is_used_up(rig: SchedulerRig) -> None:
    for number in (1, 2, 3):
        finish(rig, f"r{number}", 15 * 16, number)
    assert released(rig) == [1]
    rig.step(reported(sent=["r1"]))
    assert rig.free_blocks == rig.free_at_start - 2 * 15


def test_request_larger_than_the_share_is_not_kept(rig: SchedulerRig) -> None:
    finish(rig, "large", 33 * 16, 1)
    assert not rig.taken(Keep)
    assert rig.free_blocks == rig.free_at_start


def test_engine_without_a_share_keeps_nothing(tiny: str) -> None:
    rig = SchedulerRig(tiny, keep_share=0)
    finish(rig, "a", 40, 1)
    assert not rig.taken(Keep)


def test_engine_that_only_receives_keeps_nothing(tiny: str) -> None:
    rig = SchedulerRig(tiny, role="kv_consumer")
    finish(rig, "a", 40, 1)
    assert not rig.taken(Keep)


# pressure ---------------------------------------------------------------------------------------------------
def test_waiting_request_gets_the_blocks_it_lacks_and_no_more_are_released(rig: SchedulerRig) -> None:
    for number in (1, 2, 3):
        finish(rig, f"r{number}", 10 * 16, number)
    large = rig.add("large", (BLOCKS - 1 - 12) * 16, None)
    rig.step()
    rig.step()
    assert released(rig) == [1, 2]
    assert large.status == RequestStatus.WAITING
    rig.step(reported(sent=["r1", "r2"]))
    while not large.is_finished():
        rig.step()
    assert released(rig) == [1, 2]


def test_running_request_waits_for_kept_blocks_rather_than_be_preempted(rig: SchedulerRig) -> None:
    finish(rig, "kept", 15 * 16, 1)
    growing = [rig.add(f"g{n}", 24 * 16 - 2, None, max_tokens=20) for n in range(2)]
    report = reported()
    while not all(request.is_finished() for request in growing):
        known = len(rig.taken(Release))
        rig.step(report)
        report = reported(sent=["kept"]) if len(rig.taken(Release)) > known else reported()
    assert released(rig) == [1]
    assert [request.num_preemptions for request in growing] == [0, 0]


def test_request_that_has_loaded_its_prompt_gets_the_block_it_goes_on_with(rig: SchedulerRig) -> None:
    finish(rig, "kept", 4 * 16, 1)
    for number in range(2, 5):
        rig.add(f"r{number}", 19 * 16, receiving(number), max_tokens=2)
        rig.step()
    taken = list(rig.scheduler.requests.values())
    rig.step(reported(received=["r2", "r3", "r4"]))
    for _ in range(4):
        rig.step(
            reported(sent=["kept"]) if rig.taken(Release) and rig.connector._scheduling.kept_requests else reported()
        )
    while rig.scheduler.has_requests():
        rig.step()
    assert all(request.status == RequestStatus.FINISHED_LENGTH_CAPPED for request in taken)


def test_cache_reset_lets_go_of_everything(rig: SchedulerRig) -> None:
    finish(rig, "a", 40, 1)
    assert not rig.connector.reset_cache()
    rig.step(reported(sent=["a"]))
    assert released(rig) == [1]
    assert rig.connector.reset_cache()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)


# what is the same -------------------------------------------------------------------------------------------
def test_prompts_with_different_salts_have_nothing_in_common(rig: SchedulerRig) -> None:
    one, other = rig.add("a#1", 40, None), rig.add("a#2", 40, None)
    assert prompt_digests(one) == prompt_digests(other)
    other.cache_salt = "somebody else's"
    assert prompt_digests(one) != prompt_digests(other)
