"""The usual step, in which nothing is transferred: no engine thread does anything for it that can be left out."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from engines.scheduler_rig import Overlap, Ranks, SchedulerRig, key_of, receiving, reported
from runtime.side import TOKEN_BYTES, Side, final, new_key
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, PrefillBegun, ReceiveEnded, SourceFree
from kvpush.core.ids import RequestId
from kvpush.runtime.gate import Gate
from kvpush.transport.memory import MemoryFabric
from kvpush.vllm.connector import KVPushConnector
from kvpush.vllm.metadata import NO_COMMANDS, StepCommands
from kvpush.vllm.settings import Push
from kvpush.vllm.step_push import PART_BYTES, StepFinals, StepPush

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LONG = 4 * PART_BYTES // TOKEN_BYTES
"""Tokens of a step that is worth to be sent in parts."""


@pytest.fixture(params=[Push.PROGRESSIVE, Push.LAYERWISE])
def worker(tiny: str, request: pytest.FixtureRequest) -> Iterator[KVPushConnector]:
    """The connector in a worker, whose caches and transfer thread are those of a side."""
    rig, fabric = SchedulerRig(tiny, push=request.param), MemoryFabric()
    side = Side("engine", lambda: fabric.transport("engine"))
    side.start()
    made = KVPushConnector(rig.config, KVConnectorRole.WORKER, rig.scheduler.kv_cache_config)
    inner = made._working
    inner._thread, inner._gate = side.thread, Gate(side.thread.submit, "gate")
    inner._step = StepPush(request.param, side._layout(), inner._gate, lambda: None)
    yield made
    made.shutdown()


def hears_layers(worker: KVPushConnector, step: StepCommands) -> bool:
    """Begin a step; whether vLLM calls the hooks of its layers (see vLLM's `maybe_transfer_kv_layer`)."""
    worker.bind_connector_metadata(step)
    return bool(worker.has_connector_metadata())


def finals(tokens: int) -> StepCommands:
    return StepCommands((), StepFinals((final(new_key(), 4, (1,)),), tokens))


def test_layers_are_heard_of_only_when_they_are_sent_ahead_of_the_rest(worker: KVPushConnector) -> None:
    layerwise = worker._working._step is not None and worker._working._step._most_parts > 1
    assert not hears_layers(worker, NO_COMMANDS)
    assert hears_layers(worker, finals(LONG)) == layerwise
    worker.clear_connector_metadata()
    assert not hears_layers(worker, finals(1))
    worker.clear_connector_metadata()
    assert not hears_layers(worker, NO_COMMANDS)


def test_step_after_one_that_was_never_launched_has_nothing_of_it(worker: KVPushConnector) -> None:
    passed: list[Any] = []
    inner = worker._working
    cast(Any, inner._step)._gate = Gate(passed.extend, "gate")
    hears_layers(worker, finals(LONG))
    hears_layers(worker, NO_COMMANDS)
    worker.save_kv_layer("layer.0", cast(Any, None), None)
    worker.wait_for_save()
    assert not passed


@pytest.mark.parametrize("overlap", Overlap)
def test_step_that_decodes_what_has_come_carries_nothing(tiny: str, overlap: Overlap) -> None:
    rig = SchedulerRig(tiny, overlap=overlap)
    rig.add("a", 40, receiving(1), max_tokens=8)
    assert rig.step().kv_connector_metadata is not NO_COMMANDS
    rig.step(reported(received=["a"]))
    for _ in range(3):
        output = rig.step()
        assert output.num_scheduled_tokens == {"a": 1}
        assert output.kv_connector_metadata is NO_COMMANDS


def test_worker_that_has_nothing_to_say_says_nothing(worker: KVPushConnector) -> None:
    assert hears_layers(worker, NO_COMMANDS) is False
    results = worker.get_transfer_results(set())
    assert not results.finished_sending | results.finished_recving | results.failed_recving
    assert worker.build_connector_worker_meta() is None
    assert worker.get_kv_connector_stats() is None


@pytest.fixture(params=Overlap)
def ranks(tiny: str, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(SchedulerRig(tiny, overlap=request.param))
    yield made
    made.close()


def unheard(ranks: Ranks) -> int:
    """How many events the scheduler has not taken."""
    return len(ranks.rig.connector._scheduling._orders.line.take())


def test_news_is_asked_for_only_while_something_is_awaited(ranks: Ranks) -> None:
    rig, nobody = ranks.rig, PrefillBegun(key_of(9), RequestId("nobody"))
    rig.add("a", 40, receiving(1), max_tokens=20)
    rig.step()
    ranks.say(nobody)
    rig.step()
    assert unheard(ranks) == 0, "a is awaited"
    rig.step(reported(received=["a"]))
    rig.step()
    ranks.say(nobody)
    rig.step()
    assert unheard(ranks) == 2, "a decodes"

    rig.add("b", 40, receiving(2), max_tokens=20)
    ranks.say(ReceiveEnded(key_of(2), RequestId("b"), Outcome.DELIVERED, Reason.OK))
    rig.step()
    assert rig.step().num_scheduled_tokens == {"a": 1, "b": 1}


def test_news_that_nobody_waited_for_is_taken_with_what_a_step_reports(ranks: Ranks) -> None:
    rig = ranks.rig
    rig.add("a", 40, receiving(1), max_tokens=20)
    rig.step()
    rig.step(reported(received=["a"]))
    rig.step()
    ranks.say(PrefillBegun(key_of(9), RequestId("nobody")), SourceFree(key_of(8), RequestId("sent")))
    rig.step(reported(sent=["sent"]))
    assert unheard(ranks) == 0
