"""What a scheduler hears directly from the transfer threads, before the step that brings the same."""

from collections.abc import Iterator

import pytest
from engines.scheduler_rig import Overlap, Ranks, SchedulerRig, key_of, receiving, reported

from kvpush.core.commands import Receive
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, PrefillBegun, ReceiveEnded
from kvpush.core.ids import RequestId
from kvpush.vllm.first_token_scheduler import FirstTokenScheduler
from kvpush.vllm.metadata import RankReport

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

    ranks.outlets[1].send([delivered(token=77)])
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
