"""vLLM's real scheduler and the connector's half of it: every order of events, no block lost, no assertion."""

from itertools import permutations

import pytest
from engines.scheduler_rig import Overlap, SchedulerRig, computed, key_of, receiving, reported, sending
from vllm.v1.request import RequestStatus

from kvpush.core.commands import Abort, Announce, Disown, Expect, Final, Receive, Withdraw
from kvpush.core.errors import Reason
from kvpush.core.layout import Span

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def rig(tiny: str) -> SchedulerRig:
    return SchedulerRig(tiny)


# receiving ----------------------------------------------------------------------------------------------
def test_receiver_registers_all_blocks_of_a_prompt_it_has_nothing_of(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1))
    rig.step()

    (expect,), (receive,) = rig.taken(Expect), rig.taken(Receive)
    assert expect.key == receive.key == key_of(1)
    assert receive.span == Span(0, 40)
    assert [len(ids) for ids in receive.blocks] == [3]


def test_receiver_registers_only_the_blocks_it_lacks(rig: SchedulerRig) -> None:
    rig.add("a#warm", 33, None)
    rig.step()
    rig.add("a#cold", 70, receiving(1))
    rig.step()

    (receive,) = rig.taken(Receive)
    assert receive.span == Span(32, 70)
    assert [len(ids) for ids in receive.blocks] == [3]


@pytest.mark.parametrize("tokens", [1, 33])
def test_receiver_that_lacks_only_the_last_token_computes_it_and_says_so(rig: SchedulerRig, tokens: int) -> None:
    rig.add("a#warm", 40, None)
    rig.step()
    request = rig.add("a#cold", tokens, receiving(1))
    rig.step()

    assert rig.taken(Abort) == [Abort(key_of(1), Reason.NOT_NEEDED)]
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert rig.free_blocks == rig.free_at_start


def test_received_request_runs_and_is_not_asked_for_again(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, receiving(1), max_tokens=3)
    rig.step()
    assert rig.step().total_num_scheduled_tokens == 0

    rig.step(reported(received=["a"]))
    assert rig.step().num_scheduled_tokens == {"a": 1}
    while not request.is_finished():
        rig.step()

    assert len(rig.taken(Receive)) == 1
    assert rig.free_blocks == rig.free_at_start


def test_preempted_receiver_computes_its_prompt_itself(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, receiving(1), max_tokens=5)
    rig.step()
    rig.step(reported(received=["a"]))
    rig.step()

    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    output = rig.step()
    while not request.is_finished():
        rig.step()

    assert output.num_scheduled_tokens["a"] > 40
    assert len(rig.taken(Receive)) == 1
    assert rig.free_blocks == rig.free_at_start


def test_failed_receive_is_computed_locally_under_the_policy_recompute(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, receiving(1))
    rig.step()
    rig.step(reported(failed=["a"]))

    assert rig.step().num_scheduled_tokens == {"a": 40}
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert len(rig.taken(Receive)) == 1
    assert rig.free_blocks == rig.free_at_start


def test_failed_receive_ends_the_request_under_the_policy_fail(tiny: str) -> None:
    rig = SchedulerRig(tiny, policy="fail")
    request = rig.add("a", 40, receiving(1))
    rig.step()
    rig.step(reported(failed=["a"]))

    assert request.status == RequestStatus.FINISHED_ERROR
    assert rig.free_blocks == rig.free_at_start
    assert rig.connector._scheduling.open_requests == 0


def test_stand_in_for_a_request_that_has_failed_is_not_taken_for_another_use_of_its_key(tiny: str) -> None:
    """vLLM's API server adds a request with the same parameters, aborted at once, for each one that has ended badly."""
    rig = SchedulerRig(tiny, policy="fail")
    rig.add("a", 40, receiving(1))
    rig.step()
    rig.step(reported(failed=["a"]))
    rig.turn_away(receiving(1))
    rig.step()

    assert len(rig.taken(Expect)) == 1
    assert [command.key for command in rig.taken(Disown)] == [key_of(1)]
    assert rig.connector._scheduling.open_requests == 0


def test_stand_in_for_a_prompt_that_is_being_sent_is_ignored(rig: SchedulerRig) -> None:
    rig.add("a", 40, sending(1))
    rig.step()
    rig.turn_away(sending(1))
    rig.step(reported(sent=["a"]))

    assert len(rig.taken(Announce)) == 1
    assert not rig.taken(Withdraw)
    assert rig.free_blocks == rig.free_at_start


def test_stand_in_for_a_prompt_that_was_turned_away_is_withdrawn(rig: SchedulerRig) -> None:
    rig.turn_away(sending(1))
    rig.step()

    assert [command.key for command in rig.taken(Withdraw)] == [key_of(1)]
    assert rig.connector._scheduling.open_requests == 0


def test_blocks_of_an_aborted_receiver_are_kept_until_the_worker_lets_go(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1))
    rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step()

    assert rig.taken(Abort) == [Abort(key_of(1), Reason.ABORTED)]
    assert rig.free_blocks == rig.free_at_start - 3

    rig.step(reported(failed=["a"]))
    assert rig.free_blocks == rig.free_at_start
    assert not rig.scheduler.requests


def test_receiver_aborted_before_it_has_blocks_is_told_to_the_worker(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1))
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step()

    assert rig.taken(Abort) == [Abort(key_of(1), Reason.ABORTED)]
    assert not rig.taken(Receive)
    assert rig.free_blocks == rig.free_at_start


def test_receiver_that_needs_logits_of_its_whole_prompt_computes_it(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1), prompt_logprobs=1)
    output = rig.scheduler.schedule()

    assert output.num_scheduled_tokens == {"a": 40}
    assert Abort(key_of(1), Reason.NOT_NEEDED) in output.kv_connector_metadata.commands


def test_receiver_waits_for_blocks_without_registering_twice(rig: SchedulerRig) -> None:
    rig.add("big", 16 * 60, None, max_tokens=30)
    rig.step()
    rig.add("a", 16 * 20, receiving(1))
    for _ in range(3):
        rig.step()
    assert not rig.taken(Receive)

    while "big" in rig.scheduler.requests:
        rig.step()
    rig.step()
    assert len(rig.taken(Receive)) == 1


# sending ------------------------------------------------------------------------------------------------
def test_sender_hands_over_the_prompt_and_keeps_its_blocks_until_they_are_sent(rig: SchedulerRig) -> None:
    rig.add("a", 40, sending(1))
    rig.step()
    rig.step()

    (announce,), (final,) = rig.taken(Announce), rig.taken(Final)
    assert announce.key == final.key == key_of(1)
    assert (final.tokens, final.last, [len(ids) for ids in final.blocks]) == (40, True, [3])
    assert rig.free_blocks == rig.free_at_start - 3

    rig.step(reported(sent=["a"]))
    assert rig.free_blocks == rig.free_at_start
    assert not rig.scheduler.requests


def test_sender_whose_first_token_is_a_stop_token_hands_over_its_prompt(rig: SchedulerRig) -> None:
    request = rig.add("a", 40, sending(1), max_tokens=5, stop_token_ids=[7])
    rig.step()
    rig.step()

    assert request.status == RequestStatus.FINISHED_STOPPED
    assert [final.tokens for final in rig.taken(Final)] == [40]
    rig.step(reported(sent=["a"]))
    assert rig.free_blocks == rig.free_at_start


def test_sender_that_generates_more_hands_over_the_prompt_only(rig: SchedulerRig) -> None:
    request = rig.add("a", 32, sending(1), max_tokens=20)
    while not request.is_finished():
        rig.step()
    rig.step()

    assert [(final.tokens, [len(ids) for ids in final.blocks]) for final in rig.taken(Final)] == [(32, [2])]


@pytest.mark.parametrize("steps", [0, 1])
def test_aborted_sender_withdraws_and_frees_its_blocks_at_once(rig: SchedulerRig, steps: int) -> None:
    rig.add("a", 40, sending(1), max_tokens=5)
    for _ in range(steps):
        rig.step()
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step()

    assert [(each.key, each.reason) for each in rig.taken(Withdraw)] == [(key_of(1), Reason.PREFILL_ABORTED)]
    assert rig.free_blocks == rig.free_at_start
    rig.step(reported(sent=["a"]))
    assert rig.free_blocks == rig.free_at_start


def test_sender_tells_a_sequential_router_what_the_receiver_needs(rig: SchedulerRig) -> None:
    rig.add("1_cmpl-x-2-00000000", 40, sending(1))
    output = rig.scheduler.schedule()
    rig.commands += output.kv_connector_metadata.commands
    (outputs,) = rig.scheduler.update_from_output(output, computed(output, rig.scheduler.requests)).values()
    params = outputs.outputs[0].kv_transfer_params

    assert params["transfer_id"] == key_of(1).transfer_id
    assert params["attempt"] == 0, "the receiver derives the key of the sub-request by itself"
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_engine_id"] == rig.config.kv_transfer_config.engine_id


# reports that come late, twice or for strangers ------------------------------------------------------------
@pytest.mark.parametrize("order", list(permutations(["abort", "receive", "receive"])))
def test_receiver_survives_every_order_of_abort_and_reports(rig: SchedulerRig, order: tuple[str, ...]) -> None:
    rig.add("a", 40, receiving(1))
    rig.step()
    for event in order:
        if event == "abort":
            rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        else:
            rig.step(reported(received=["a"]))
    rig.step()

    assert rig.free_blocks == rig.free_at_start
    assert not rig.scheduler.requests


def test_reports_for_requests_that_are_gone_change_nothing(rig: SchedulerRig) -> None:
    rig.step(reported(received=["x"], failed=["y"], sent=["z"]))
    rig.add("a", 40, None)
    rig.step(reported(received=["a"], sent=["a"]))

    assert rig.free_blocks == rig.free_at_start


def test_sender_reported_twice_is_freed_once(rig: SchedulerRig) -> None:
    rig.add("a", 40, sending(1))
    rig.step()
    rig.step(reported(sent=["a"]))
    rig.step(reported(sent=["a"]))

    assert rig.free_blocks == rig.free_at_start


# bad parameters -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transfer_id": 7},
        {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "h"},
        {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "h", "remote_port": 99999},
        {"do_remote_decode": True, "transfer_id": "x", "attempt": -1},
        {"do_remote_decode": "perhaps"},
    ],
)
def test_request_with_bad_parameters_is_computed_as_if_it_had_none(
    rig: SchedulerRig, params: dict[str, object]
) -> None:
    request = rig.add("a", 40, params)
    rig.step()

    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert not rig.commands
    assert rig.counters.counted == {("request_refused", Reason.BAD_MESSAGE): 1}
    assert rig.free_blocks == rig.free_at_start


@pytest.mark.parametrize(("role", "params"), [("kv_producer", receiving(1)), ("kv_consumer", sending(1))])
def test_engine_refuses_a_part_that_its_role_cannot_play_safely(
    tiny: str, role: str, params: dict[str, object]
) -> None:
    rig = SchedulerRig(tiny, role=role)
    request = rig.add("a", 40, params)
    rig.step()

    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert not rig.commands
    assert rig.counters.counted == {("request_refused", Reason.BAD_MESSAGE): 1}


# R12 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("role", "deferred"), [("kv_consumer", True), ("kv_both", True), ("kv_producer", False)])
def test_vllm_keeps_blocks_of_running_steps_from_engines_that_may_receive(
    tiny: str, role: str, *, deferred: bool
) -> None:
    rig = SchedulerRig(tiny, role=role, overlap=Overlap.ASYNC)

    assert rig.scheduler.defer_block_free is deferred
