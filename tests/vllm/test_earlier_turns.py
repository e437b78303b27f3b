"""vLLM's real scheduler, and prompts that begin with an earlier turn: asked about, received, or computed after all."""

import pytest
from engines.scheduler_rig import Overlap, SchedulerRig, key_of, receiving, reported, sending
from vllm.v1.request import Request, RequestStatus

from kvpush.core.commands import Abort, Expect, Final, Inquire, Receive
from kvpush.core.errors import Reason
from kvpush.core.events import Purpose
from kvpush.core.layout import Span
from kvpush.vllm.metadata import RankReport
from kvpush.vllm.tokens import prompt_digests

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=list(Overlap), ids=lambda overlap: overlap.name.lower())
def rig(tiny: str, request: pytest.FixtureRequest) -> SchedulerRig:
    """Under the policy that fails requests whose prompts do not come."""
    return SchedulerRig(tiny, overlap=request.param, policy="fail")


def found(tokens: int, name: str = "a") -> RankReport:
    return RankReport(found=((name, tokens),))


def assert_all_free(rig: SchedulerRig) -> None:
    assert rig.free_blocks == rig.free_at_start
    assert not rig.scheduler.requests
    assert rig.connector._scheduling.open_requests == 0


def finish(rig: SchedulerRig, request: Request) -> None:
    """Let a prefill leg finish, and its prompt be sent."""
    while not request.is_finished():
        rig.step()
    rig.step()
    rig.step(reported(sent=[request.request_id]))


def test_sender_asks_receives_what_is_found_and_computes_the_rest(rig: SchedulerRig) -> None:
    request = rig.add("a", 100, sending(1, reuse=2))
    assert rig.step().total_num_scheduled_tokens == 0
    (inquire,) = rig.taken(Inquire)
    assert (inquire.key, inquire.digests) == (key_of(2), prompt_digests(request))
    assert [expect.key for expect in rig.taken(Expect)] == [key_of(2)]
    assert rig.free_blocks == rig.free_at_start, "no block is taken before it is known what is there"

    rig.step(reported(more=found(48)))
    rig.step()
    (receive,) = rig.taken(Receive)
    assert (receive.key, receive.span, receive.purpose) == (key_of(2), Span(0, 48), Purpose.CONVERSATION)
    rig.step(reported(received=["a"]))
    assert rig.step().num_scheduled_tokens == {"a": 52}
    finish(rig, request)
    (final,) = rig.taken(Final)
    assert (final.key, final.tokens) == (key_of(1), 100)
    assert_all_free(rig)


def test_second_request_with_the_same_earlier_turn_computes_it_and_does_not_end_the_first(rig: SchedulerRig) -> None:
    rig.add("a", 100, sending(1, reuse=2))
    rig.add("b", 100, sending(3, reuse=2))
    assert rig.step().num_scheduled_tokens == {"b": 100}
    assert len(rig.taken(Inquire)) == 1
    assert not rig.taken(Abort)

    rig.step(reported(more=found(48)))
    rig.step()
    assert [receive.request_id for receive in rig.taken(Receive)] == ["a"]


def test_sender_receives_only_what_its_own_cache_lacks(rig: SchedulerRig) -> None:
    warm = rig.add("a#warm", 33, None)
    finish(rig, warm)
    rig.add("a#cold", 100, sending(1, reuse=2))
    rig.step(reported(more=found(80, "a#cold")))
    rig.step()
    assert [receive.span for receive in rig.taken(Receive)] == [Span(32, 80)]


@pytest.mark.parametrize("tokens", [0, 32], ids=["nothing", "no more than it has"])
def test_sender_computes_at_once_when_there_is_nothing_for_it(rig: SchedulerRig, tokens: int) -> None:
    warm = rig.add("a#warm", 33, None)
    finish(rig, warm)
    request = rig.add("a#cold", 100, sending(1, reuse=2))
    rig.step(reported(more=found(tokens, "a#cold")))
    assert rig.step().num_scheduled_tokens == {"a#cold": 68}
    finish(rig, request)
    assert rig.taken(Abort) == [Abort(key_of(2), Reason.NOT_NEEDED)]
    assert_all_free(rig)


@pytest.mark.parametrize("is_quarantined", [False, True], ids=["blocks safe", "blocks in quarantine"])
def test_earlier_turn_that_does_not_come_is_computed_whatever_the_policy(
    rig: SchedulerRig, is_quarantined: bool
) -> None:
    request = rig.add("a", 100, sending(1, reuse=2))
    rig.step(reported(more=found(48)))
    rig.step()
    first = set(rig.scheduler.kv_cache_manager.get_block_ids("a")[0])
    kept = ("a",) if is_quarantined else ()
    rig.step(reported(received=["a"], more=RankReport(lost=("a",), kept=kept)))

    assert rig.step().num_scheduled_tokens == {"a": 100}
    if is_quarantined:
        assert first.isdisjoint(rig.scheduler.kv_cache_manager.get_block_ids("a")[0])
    finish(rig, request)
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    rig.step(reported(more=RankReport(released=kept)))
    assert_all_free(rig)


def test_sender_waits_for_all_ranks_and_takes_what_all_have(tiny: str) -> None:
    rig = SchedulerRig(tiny)
    rig.connector._scheduling._ranks = 2
    rig.add("a", 100, sending(1, reuse=2))
    rig.step(reported(more=found(48)))
    rig.step()
    assert not rig.taken(Receive)
    rig.step(reported(more=found(32)))
    rig.step()
    assert [receive.span for receive in rig.taken(Receive)] == [Span(0, 32)]


@pytest.mark.parametrize("steps", [1, 3], ids=["while it asks", "while it receives"])
def test_aborted_sender_leaves_nothing(rig: SchedulerRig, steps: int) -> None:
    rig.add("a", 100, sending(1, reuse=2))
    for report in (reported(), reported(more=found(48)), reported())[:steps]:
        rig.step(report)
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    rig.step()
    assert Abort(key_of(2), Reason.ABORTED) in rig.taken(Abort)
    rig.step(reported(received=["a"], more=RankReport(lost=("a",))))
    assert_all_free(rig)


def test_engine_that_only_sends_ignores_earlier_turns(tiny: str) -> None:
    rig = SchedulerRig(tiny, role="kv_producer")
    rig.add("a", 100, sending(1, reuse=2))
    assert rig.step().num_scheduled_tokens == {"a": 100}
    assert not rig.taken(Inquire)


def test_one_engine_sends_one_prompt_while_it_receives_another(rig: SchedulerRig) -> None:
    sender = rig.add("a", 40, sending(1))
    rig.add("b", 40, receiving(2))
    rig.step()
    rig.step(reported(sent=["a"], received=["b"]))
    while rig.scheduler.has_requests():
        rig.step()
    assert sender.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert_all_free(rig)
