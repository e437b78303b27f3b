"""The worker's side on its own: one bad command costs its own request, and nothing else."""

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar, cast

import pytest
from runtime.rig import until
from runtime.side import Side, final, new_key, receive

from kvpush.core.commands import Final, Receive, Withdraw
from kvpush.core.errors import Reason
from kvpush.core.ids import Address, RequestId
from kvpush.runtime.gate import Gate
from kvpush.runtime.local import SchedulerEnd
from kvpush.transport.memory import MemoryFabric
from kvpush.vllm.layouts import BlockSplit, CacheLayout
from kvpush.vllm.localize import localize
from kvpush.vllm.metadata import StepCommands
from kvpush.vllm.ranks import Rank
from kvpush.vllm.settings import Push, read_settings
from kvpush.vllm.step_push import StepFinals, StepPush
from kvpush.vllm.worker_side import STEPS_AHEAD, WorkerSide

_C = TypeVar("_C", Receive, Final)

NOBODY = Address("127.0.0.1", 9)
BLOCK, TOKENS = (1,), 4


@pytest.fixture
def worker() -> Iterator[WorkerSide]:
    """A worker whose caches and transfer thread are those of a side."""
    fabric = MemoryFabric()
    side = Side("engine", lambda: fabric.transport("engine"))
    cache = CacheLayout(side._layout(), (BlockSplit(TOKENS, 1),))
    side.localize_with(partial(localize, rank=Rank(0, 1, 0, 1), cache=cache))
    side.start()
    made = WorkerSide(cast(Any, None), cast(Any, None), read_settings({"port": 0}), Push.PROGRESSIVE, lambda _: None)
    made._thread = side.thread
    made._gate = Gate(side.thread.submit, "gate")
    made._step = StepPush(Push.PROGRESSIVE, cache.layout, made._gate, lambda: None)
    yield made
    made.stop()


def with_blocks_of_two_groups(command: _C) -> _C:
    """What no scheduler should say of a cache with one."""
    return type(command)(
        **{**{name: getattr(command, name) for name in command.__struct_fields__}, "blocks": (BLOCK,) * 2}
    )


def test_receive_that_cannot_be_read_fails_and_the_one_behind_it_goes_on(worker: WorkerSide) -> None:
    bad = with_blocks_of_two_groups(receive(new_key(), NOBODY, TOKENS, BLOCK))
    good = receive(new_key(), NOBODY, TOKENS, BLOCK)

    worker.begin_step(StepCommands((bad, good)))

    worker.forward_launched()
    assert until(lambda: worker.results().failed_recving) == {bad.request_id}
    assert until(lambda: worker.results().failed_recving) == {good.request_id}


def test_prompt_that_cannot_be_read_is_withdrawn(worker: WorkerSide) -> None:
    bad = with_blocks_of_two_groups(final(new_key(), TOKENS, BLOCK))

    worker.begin_step(StepCommands((), StepFinals((bad,), TOKENS)))
    worker.forward_launched()

    assert until(lambda: worker.results().finished_sending) == {bad.request_id}


def test_answer_to_a_command_heard_directly_waits_for_the_step_that_brings_it(worker: WorkerSide) -> None:
    assert worker._thread is not None
    bad = with_blocks_of_two_groups(receive(new_key(), NOBODY, TOKENS, BLOCK))
    scheduler = SchedulerEnd([worker._thread.local_path])
    heard = scheduler.say(bad)
    assert heard == {0}
    until(lambda: worker.results() and worker._ahead)
    assert not worker.results().finished_recving

    worker.begin_step(StepCommands((bad,), heard=(heard,)))

    assert worker.results().failed_recving == {bad.request_id}
    assert not worker._ahead
    scheduler.close()


def test_event_that_nobody_waits_for_is_let_go_after_some_steps(worker: WorkerSide) -> None:
    assert worker._thread is not None
    worker._thread.submit([Withdraw(new_key(), RequestId("gone"), Reason.ABORTED)])
    until(lambda: not worker.results().finished_sending and worker._ahead)
    for _ in range(STEPS_AHEAD):
        worker.results()
    assert not worker._ahead
