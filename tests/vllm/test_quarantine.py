"""Blocks that a late write may reach stay out of vLLM's pool, while their request goes on without them."""

import pytest
from engines.scheduler_rig import BLOCKS, SchedulerRig, receiving, reported
from vllm.v1.request import RequestStatus

from kvpush.vllm.metadata import RankReport

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_KEPT = RankReport(kept=("a",))
_SAFE = RankReport(released=("a",))


@pytest.fixture
def rig(tiny: str) -> SchedulerRig:
    return SchedulerRig(tiny)


def test_failed_receive_is_recomputed_at_once_in_other_blocks(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, receiving(1), max_tokens=3)
    rig.step()
    first = set(rig.scheduler.kv_cache_manager.get_block_ids("a")[0])
    rig.step(reported(failed=["a"], more=_KEPT))

    output = rig.step()

    assert output.num_scheduled_tokens == {"a": 40}
    assert first.isdisjoint(rig.scheduler.kv_cache_manager.get_block_ids("a")[0])
    while not request.is_finished():
        rig.step()
    assert rig.free_blocks == rig.free_at_start - len(first)
    rig.step(reported(more=_SAFE))
    assert rig.free_blocks == rig.free_at_start


def test_failed_request_ends_at_once_and_its_blocks_follow(tiny: str) -> None:
    rig = SchedulerRig(tiny, policy="fail")
    request = rig.add("a", 40, receiving(1))
    rig.step()
    rig.step(reported(failed=["a"], more=_KEPT))

    assert request.status == RequestStatus.FINISHED_ERROR
    assert rig.free_blocks == rig.free_at_start - 3
    assert rig.scheduler.has_requests(), "somebody has to hear that the blocks are safe"
    rig.step(reported(more=_SAFE))
    assert rig.free_blocks == rig.free_at_start
    assert not rig.scheduler.has_requests()


def test_aborted_request_is_gone_at_once_and_its_blocks_follow(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1))
    rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step(reported(failed=["a"], more=_KEPT))

    assert not rig.scheduler.requests
    assert rig.free_blocks == rig.free_at_start - 3
    rig.step(reported(more=_SAFE))
    assert rig.free_blocks == rig.free_at_start


def test_blocks_are_free_only_when_every_rank_calls_them_safe(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1))
    rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step(reported(failed=["a"], more=_KEPT.aggregate(_KEPT)))

    rig.step(reported(more=_SAFE))
    assert rig.free_blocks == rig.free_at_start - 3
    rig.step(reported(more=_SAFE))
    assert rig.free_blocks == rig.free_at_start


def test_other_requests_wait_for_quarantined_blocks_rather_than_take_them(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1))
    rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step(reported(failed=["a"], more=_KEPT))
    large = rig.add("b", (BLOCKS - 2) * 16, None)

    assert rig.step().total_num_scheduled_tokens == 0
    rig.step(reported(more=_SAFE))
    while not large.is_finished():
        rig.step()
    assert rig.free_blocks == rig.free_at_start
