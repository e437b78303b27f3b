"""Steps without work: they wait for news, and for nothing that something else depends on."""

import threading
import time
from collections.abc import Iterator

import pytest
from engines.scheduler_rig import Overlap, Ranks, SchedulerRig, computed, key_of, receiving, reported, sending
from vllm.v1.request import RequestStatus

from kvpush.core.errors import Reason
from kvpush.core.events import BlocksSafe, Event, Outcome, PrefillBegun, ReceiveEnded, SourceFree
from kvpush.core.ids import RequestId
from kvpush.vllm.connector import _choose_lull
from kvpush.vllm.lull import LONGEST_MS, Lull

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LONG_S = 5.0
"""Steps wait so long in these tests that nobody takes one that has waited for one that has not."""
KEY, NAME = key_of(1), RequestId("a")


class Patient(Lull):
    """Waits from the first step on that has nothing to do, and so long that it cannot be missed."""

    def __init__(self, most_steps: int) -> None:
        super().__init__(most_steps, int(LONG_S * 1000))

    def step_scheduled(self, tokens: int) -> None:
        super().step_scheduled(tokens)
        self._empty *= 10**6


@pytest.fixture(params=Overlap)
def quick(tiny: str, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks whose scheduler waits as it does for users."""
    made = Ranks(SchedulerRig(tiny, overlap=request.param))
    yield made
    made.close()


@pytest.fixture
def ranks(quick: Ranks) -> Ranks:
    """Ranks whose scheduler waits long."""
    quick.rig.connector._scheduling._lull = Patient(2)
    return quick


def step_waits(rig: SchedulerRig) -> bool:
    """Take a step; whether it has waited."""
    began = time.monotonic()
    rig.step()
    return time.monotonic() - began > LONG_S / 2


def step_hears(ranks: Ranks, *events: Event) -> bool:
    """Take a step during which the ranks say something; whether it has ended then."""
    saying = threading.Timer(0.05, ranks.say, events)
    saying.start()
    waited = step_waits(ranks.rig)
    saying.join()
    return not waited


def test_step_waits_longer_the_longer_there_has_been_nothing_and_never_too_long() -> None:
    lull, waits = Lull(2), []
    for _ in range(100):
        lull.step_scheduled(0)
        waits.append(lull.wait_ms(0))
        lull.step_ended()
    assert waits[:3] == [0, 0, 0]
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_MS
    lull.heard()
    assert lull.wait_ms(0) == 0


def test_registration_that_waits_takes_few_steps(quick: Ranks) -> None:
    quick.rig.add("a", 40, receiving(1))
    steps, until = 0, time.monotonic() + 1.0
    while time.monotonic() < until:
        assert quick.rig.step().total_num_scheduled_tokens == 0
        steps += 1
    assert steps < 1000 / LONGEST_MS + 40


@pytest.mark.parametrize(
    "news",
    [
        PrefillBegun(KEY, NAME),
        ReceiveEnded(KEY, NAME, Outcome.DELIVERED, Reason.OK),
        ReceiveEnded(KEY, NAME, Outcome.FAILED, Reason.TRANSPORT),
        BlocksSafe(KEY, NAME),
        SourceFree(KEY, NAME),
    ],
    ids=lambda news: f"{type(news).__name__}-{getattr(news, 'outcome', '')}",
)
def test_step_that_waits_ends_with_any_news(ranks: Ranks, news: Event) -> None:
    ranks.rig.add("a", 40, receiving(1))
    ranks.rig.step()
    assert step_hears(ranks, news)


def test_step_waits_while_a_finished_prompt_is_being_sent(ranks: Ranks) -> None:
    ranks.rig.add("a", 40, sending(1))
    ranks.rig.step()
    assert not step_waits(ranks.rig), "commands wait for it"
    assert step_waits(ranks.rig)
    assert step_hears(ranks, SourceFree(KEY, NAME))
    ranks.rig.step(reported(sent=["a"]))
    assert not step_waits(ranks.rig), "nothing is going on any more"
    assert ranks.rig.free_blocks == ranks.rig.free_at_start


def test_step_does_not_wait_while_another_one_runs(ranks: Ranks) -> None:
    rig = ranks.rig
    rig.add("a", 40, receiving(1))
    rig.add("b", 40, None)
    running = rig.scheduler.schedule()
    results = computed(running, rig.scheduler.requests)
    rig.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    began = time.monotonic()
    empty = rig.scheduler.schedule()
    assert time.monotonic() - began < LONG_S / 2
    assert (running.total_num_scheduled_tokens, empty.total_num_scheduled_tokens) == (40, 0)
    rig.scheduler.update_from_output(running, results)
    rig.scheduler.update_from_output(empty, computed(empty, {}))
    assert step_waits(rig)


def test_step_does_not_wait_when_other_requests_may_be_ready(ranks: Ranks) -> None:
    rig = ranks.rig
    rig.add("a", 40, receiving(1))
    rig.step()
    rig.connector._scheduling._lull.request_added("that waits for a grammar")
    assert not step_waits(rig)
    assert not step_waits(rig)


def test_step_does_not_wait_for_ranks_that_cannot_be_heard(ranks: Ranks) -> None:
    ranks.rig.add("a", 40, receiving(1))
    ranks.rig.step()
    ranks.threads[1].close()
    ranks.rig.step()
    ranks.rig.connector._scheduling._hear()
    assert not step_waits(ranks.rig)


def test_data_parallel_ranks_do_not_wait(tiny: str) -> None:
    rig = SchedulerRig(tiny)
    rig.config.parallel_config.data_parallel_size = 2
    lull = _choose_lull(rig.config)
    for _ in range(100):
        lull.step_scheduled(0)
        lull.step_ended()
    assert lull.wait_ms(0) == 0
