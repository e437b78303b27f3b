"""A decode engine's real scheduler begins requests with tokens that were sampled elsewhere, or says why it does not."""

from typing import Any

import pytest
from engines.scheduler_rig import Overlap, SchedulerRig, receiving, reported, sending
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvpush.core.commands import Final, Receive, Sampled
from kvpush.core.errors import Reason
from kvpush.vllm.first_token_scheduler import FirstTokenScheduler
from kvpush.vllm.metadata import RankReport
from kvpush.vllm.settings import Push

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_TOKEN = 77
_COMES = reported(received=["a"], more=RankReport(tokens=(("a", _TOKEN),)))


@pytest.fixture(params=Overlap)
def rig(tiny: str, request: pytest.FixtureRequest) -> SchedulerRig:
    return SchedulerRig(tiny, overlap=request.param, scheduler=FirstTokenScheduler)


def counted(rig: SchedulerRig) -> dict[Reason, int]:
    return {reason: number for (name, reason), number in rig.counters.counted.items() if name == "first_token"}


def finish(rig: SchedulerRig, name: str) -> None:
    for _ in range(20):
        if name in rig.ended:
            return
        rig.step()
    raise AssertionError(f"{name} does not end")


def test_request_begins_with_the_token_and_goes_on_from_it(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1), max_tokens=3)
    rig.step()
    (receive,) = rig.taken(Receive)
    assert receive.wants_token
    rig.step(_COMES)
    assert rig.emitted == {"a": [_TOKEN]}, "the client has it before this engine has done anything"

    output = rig.step()
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, output.num_scheduled_tokens) == (40, {"a": 1})
    assert new.prompt_token_ids is not None
    assert (len(new.prompt_token_ids), new.prompt_token_ids[-1]) == (41, _TOKEN)
    cached = rig.step().scheduled_cached_reqs
    assert cached.num_output_tokens == [1], "the worker has seen one, and takes the first for prompt"
    finish(rig, "a")

    assert len(rig.emitted["a"]) == 3
    assert rig.ended == {"a": FinishReason.LENGTH}
    assert counted(rig) == {Reason.OK: 1}
    assert rig.free_blocks == rig.free_at_start


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        pytest.param({"max_tokens": 1}, FinishReason.LENGTH, id="max_tokens"),
        pytest.param({"max_tokens": 9, "stop_token_ids": [_TOKEN]}, FinishReason.STOP, id="stop token"),
    ],
)
def test_request_that_ends_with_its_first_token_never_runs(
    rig: SchedulerRig, sampling: dict[str, Any], reason: FinishReason
) -> None:
    rig.add("a", 40, receiving(1), **sampling)
    rig.step()
    rig.step(_COMES)
    assert (rig.emitted, rig.ended) == ({"a": [_TOKEN]}, {"a": reason})
    assert not rig.step().num_scheduled_tokens
    assert rig.free_blocks == rig.free_at_start
    assert rig.connector._scheduling.open_requests == 0
    assert not rig.scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"logprobs": 2}, Reason.LOGPROBS),
        ({"seed": 5, "temperature": 0.8}, Reason.SEED),
        ({"presence_penalty": 0.5}, Reason.OUTPUT_HISTORY),
        ({"frequency_penalty": 0.5}, Reason.OUTPUT_HISTORY),
        ({"min_tokens": 2}, Reason.OUTPUT_HISTORY),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, Reason.STRUCTURED_OUTPUT),
    ],
)
def test_request_whose_sampling_needs_more_than_the_token_does_not_ask_for_it(
    rig: SchedulerRig, sampling: dict[str, Any], reason: Reason
) -> None:
    request = rig.add("a", 40, receiving(1), max_tokens=4, **sampling)
    request.status = RequestStatus.WAITING  # whatever a grammar would make it wait for
    rig.step()
    (receive,) = rig.taken(Receive)
    assert not receive.wants_token
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step(reported(received=["a"]))
    assert counted(rig) == {reason: 1}


def test_greedy_request_with_a_seed_begins_with_the_token(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1), max_tokens=4, seed=5, temperature=0.0)
    rig.step()
    assert rig.taken(Receive)[0].wants_token


def test_prompt_that_comes_without_a_token_is_sampled_here(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1), max_tokens=2)
    rig.step()
    rig.step(reported(received=["a"]))
    finish(rig, "a")
    assert len(rig.emitted["a"]) == 2
    assert counted(rig) == {Reason.NO_TOKEN: 1}


def test_prompt_that_failed_to_come_is_computed_here(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1), max_tokens=2)
    rig.step()
    rig.step(reported(failed=["a"]))
    finish(rig, "a")
    assert len(rig.emitted["a"]) == 2
    assert Reason.OK not in counted(rig)


def test_request_preempted_after_its_first_token_repeats_nothing(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, receiving(1), max_tokens=5)
    rig.step()
    rig.step(_COMES)
    rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    output = rig.step()
    assert output.num_scheduled_tokens["a"] == request.num_prompt_tokens + len(rig.emitted["a"]) - 1
    finish(rig, "a")
    assert len(rig.emitted["a"]) == 5
    assert rig.emitted["a"].count(_TOKEN) == 1
    assert rig.free_blocks == rig.free_at_start


def test_request_that_is_aborted_when_its_token_comes_says_nothing(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1), max_tokens=5)
    rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step(_COMES)
    assert not rig.emitted
    assert rig.free_blocks == rig.free_at_start


def test_engine_with_vllms_own_scheduler_asks_for_no_token(tiny: str) -> None:
    rig = SchedulerRig(tiny)
    rig.add("a", 40, receiving(1))
    rig.step()
    assert not rig.taken(Receive)[0].wants_token
    assert not counted(rig)


@pytest.mark.parametrize("push", Push)
def test_sender_tells_the_token_it_has_sampled(tiny: str, push: Push) -> None:
    rig = SchedulerRig(tiny, push=push)
    request = rig.add("a", 40, sending(1))
    rig.step()
    rig.step()
    (sampled,) = rig.taken(Sampled)
    assert sampled.token == request.output_token_ids[0]
    assert rig.taken(Final)
