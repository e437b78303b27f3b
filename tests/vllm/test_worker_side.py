"""The worker's side on its own: one bad command costs its own request, and nothing else."""

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import pytest
from runtime.rig import until
from runtime.side import Side, final, new_key, receive

from kvpush.core.commands import Final, Receive
from kvpush.core.ids import Address
from kvpush.runtime.gate import Gate
from kvpush.transport.memory import MemoryFabric
from kvpush.vllm.layouts import BlockSplit, CacheLayout
from kvpush.vllm.metadata import StepCommands
from kvpush.vllm.ranks import Rank
from kvpush.vllm.settings import Push, read_settings
from kvpush.vllm.step_push import StepFinals, StepPush
from kvpush.vllm.worker_side import WorkerSide

_C = TypeVar("_C", Receive, Final)

NOBODY = Address("127.0.0.1", 9)
BLOCK, TOKENS = (1,), 4


@pytest.fixture
def worker() -> Iterator[WorkerSide]:
    """A worker whose caches and transfer thread are those of a side."""
    fabric = MemoryFabric()
    side = Side("engine", lambda: fabric.transport("engine"))
    side.start()
    made = WorkerSide(cast(Any, None), cast(Any, None), read_settings({"port": 0}), Push.PROGRESSIVE, lambda _: None)
    made._rank, made._thread = Rank(0, 1, 0, 1), side.thread
    made._cache = CacheLayout(side._layout(), (BlockSplit(TOKENS, 1),))
    made._gate = Gate(side.thread.submit, "gate")
    made._step = StepPush(Push.PROGRESSIVE, made._cache.layout, made._gate, lambda: None)
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

    results = worker.results()
    assert results.finished_recving == results.failed_recving == {bad.request_id}
    worker.forward_launched()
    assert until(lambda: worker.results().failed_recving) == {good.request_id}


def test_prompt_that_cannot_be_read_is_withdrawn(worker: WorkerSide) -> None:
    bad = with_blocks_of_two_groups(final(new_key(), TOKENS, BLOCK))

    worker.begin_step(StepCommands((), StepFinals((bad,), TOKENS)))
    worker.forward_launched()

    assert until(lambda: worker.results().finished_sending) == {bad.request_id}
