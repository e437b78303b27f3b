"""Prompts that vLLM's scheduler computes although they were to come are reported, before any token of their answers."""

import pytest
from engines.scheduler_rig import Overlap, SchedulerRig, key_of, receiving, reported
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ID = key_of(1).transfer_id


@pytest.mark.parametrize("overlap", Overlap)
def test_failed_receive_is_reported_before_the_answers_first_token(tiny: str, overlap: Overlap) -> None:
    rig = SchedulerRig(tiny, overlap=overlap)
    request = rig.add("a", 40, receiving(1), max_tokens=3)
    rig.step()
    rig.step(reported(failed=["a"]))

    assert rig.recomputed == [ID]
    assert "a" not in rig.emitted
    while not request.is_finished():
        rig.step()
    assert len(rig.emitted["a"]) == 3
    assert rig.recomputed == [ID]


def test_received_prompt_is_not_reported(tiny: str) -> None:
    rig = SchedulerRig(tiny)
    request = rig.add("a", 40, receiving(1))
    rig.step()
    rig.step(reported(received=["a"]))
    while not request.is_finished():
        rig.step()
    assert rig.recomputed == []


def test_failed_receive_is_not_reported_when_its_request_fails(tiny: str) -> None:
    rig = SchedulerRig(tiny, policy="fail")
    rig.add("a", 40, receiving(1))
    rig.step()
    rig.step(reported(failed=["a"]))
    assert "a" in rig.ended
    assert rig.recomputed == []


def test_failed_receive_is_not_reported_when_its_client_has_left(tiny: str) -> None:
    rig = SchedulerRig(tiny)
    rig.add("a", 40, receiving(1))
    rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step(reported(failed=["a"]))
    assert rig.recomputed == []


def test_prompt_whose_logits_are_asked_for_is_reported(tiny: str) -> None:
    rig = SchedulerRig(tiny)
    rig.add("a", 40, receiving(1), prompt_logprobs=1)
    rig.step()
    assert rig.recomputed == [ID]


def test_prompt_that_the_engine_has_already_is_not_reported(tiny: str) -> None:
    rig = SchedulerRig(tiny)
    first = rig.add("a", 40, None)
    while not first.is_finished():
        rig.step()
    second = rig.add("a#again", 33, receiving(1))  # two of its blocks, and a last token
    while not second.is_finished():
        rig.step()
    assert rig.recomputed == []


def test_prompt_for_an_engine_that_never_receives_is_reported(tiny: str) -> None:
    rig = SchedulerRig(tiny, role="kv_producer")
    rig.add("a", 40, receiving(1))
    rig.step()
    assert rig.recomputed == [ID]
