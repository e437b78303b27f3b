"""Blocks are set aside early only while there is plenty, else when the prefill engine has begun."""

import pytest
from engines.scheduler_rig import BLOCK, BLOCKS, SchedulerRig, key_of, receiving, reported, sending

from kvpush.core.commands import Begin, Receive, Watch
from kvpush.vllm.metadata import RankReport
from kvpush.vllm.settings import Push

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_LONGEST = 1024 // BLOCK
"""Blocks of the longest prompt that the rig's engine takes: as many as it has."""


@pytest.fixture
def rig(tiny: str) -> SchedulerRig:
    """An engine that never has plenty."""
    assert _LONGEST == BLOCKS
    return SchedulerRig(tiny, reserve_early=0.5)


def test_receiver_without_plenty_of_blocks_takes_none_before_the_prefill_has_begun(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1))
    for _ in range(3):
        rig.step()
    assert [command.key for command in rig.taken(Watch)] == [key_of(1)]
    assert rig.free_blocks == rig.free_at_start

    rig.step(reported(more=RankReport(begun=("a",))))
    rig.step()
    assert [command.key for command in rig.taken(Receive)] == [key_of(1)]
    assert len(rig.taken(Watch)) == 1


def test_receiver_that_waits_holds_up_no_other_request(rig: SchedulerRig) -> None:
    rig.add("a", 40, receiving(1))
    rig.add("b", 40, None)
    assert rig.step().num_scheduled_tokens == {"b": 40}


def test_receiver_with_plenty_of_blocks_takes_them_at_once_and_asks_nothing(tiny: str) -> None:
    rig = SchedulerRig(tiny)
    rig.add("a", 40, receiving(1))
    rig.step()
    assert rig.taken(Receive)
    assert not rig.taken(Watch)


def test_word_about_a_request_that_has_gone_is_ignored(rig: SchedulerRig) -> None:
    rig.step(reported(more=RankReport(begun=("nobody",))))
    assert rig.connector._scheduling.open_requests == 0


@pytest.mark.parametrize("push", Push)
def test_sender_says_that_it_has_begun_with_the_last_chunk(tiny: str, push: Push) -> None:
    rig = SchedulerRig(tiny, push=push, batched_tokens=64)
    rig.add("a", 150, sending(1))
    rig.step()
    rig.step()
    assert not rig.taken(Begin)
    rig.step()
    assert [command.key for command in rig.taken(Begin)] == [key_of(1)]
