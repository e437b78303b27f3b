"""What a worker counts is what `/metrics` shows."""

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Ended, ModeChosen, Outcome, Purpose, Role, TransferRecord
from kvpush.core.ids import Address, Key, RequestId, TransferId
from kvpush.core.mode import Mode
from kvpush.vllm.metrics import EngineMetrics, EngineStats
from kvpush.vllm.recomputed import MOST_IDS, RECOMPUTED

_LABELS = {"model_name": "m", "engine": "0"}


_SCHEDULER = "kvpush.vllm.first_token_scheduler.FirstTokenScheduler"


def _config(extra: dict[str, Any], engines: int = 1, scheduler: str | None = None) -> Any:
    transfer = SimpleNamespace(engine_id="e1", kv_role="kv_producer", kv_connector_extra_config=extra)
    parallel = SimpleNamespace(
        tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=engines, data_parallel_index=0
    )
    scheduling = SimpleNamespace(scheduler_cls=scheduler)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel, scheduler_config=scheduling)


def _metrics(extra: dict[str, Any], engines: int = 1, scheduler: str | None = None) -> EngineMetrics:
    kinds: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    values: dict[int, list[object]] = {index: ["m", str(index)] for index in range(engines)}
    return EngineMetrics(_config(extra, engines, scheduler), kinds, list(_LABELS), values)


def _ended(outcome: Outcome, reason: Reason, purpose: Purpose = Purpose.PROMPT) -> Ended:
    at = {"requested": 1.0, "accepted": 1.01, "noticed": 1.05, "ended": 1.05}
    key, request = Key(TransferId("t")), RequestId("r")
    return Ended(
        TransferRecord(
            key=key,
            role=Role.RECEIVER,
            request_id=request,
            peer="p",
            outcome=outcome,
            reason=reason,
            tokens=100,
            nbytes=5000,
            descriptors=8,
            purpose=purpose,
            at=at,
        )
    )


def _value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {**_LABELS, **labels})


def _carried(stats: EngineStats) -> dict[str, Any]:
    """As vLLM carries it: pickled from a worker, encoded on to the API server."""
    arrived = pickle.loads(pickle.dumps(stats.take()))
    return dict(json.loads(json.dumps(arrived.to_dict())))


def test_ends_and_volumes_of_transfers_appear_by_role_and_reason() -> None:
    metrics, stats = _metrics({}), EngineStats()
    stats.add(_ended(Outcome.DELIVERED, Reason.OK))
    stats.add(_ended(Outcome.DELIVERED, Reason.OK, Purpose.CONVERSATION))
    stats.add(_ended(Outcome.FAILED, Reason.PEER_SILENT))
    metrics.observe(_carried(stats))

    assert _value("kvpush_transfers_total", role="receiver", outcome="delivered", reason="ok") == 2
    assert _value("kvpush_transfers_total", role="receiver", outcome="failed", reason="peer_silent") == 1
    assert _value("kvpush_bytes_total", role="receiver") == 10_000
    assert _value("kvpush_tokens_total", role="receiver") == 200
    assert _value("kvpush_descriptors_total", role="receiver") == 16
    assert _value("kvpush_tokens_reused_total") == 100


def test_stages_of_delivered_transfers_appear_as_histograms() -> None:
    metrics, stats = _metrics({}), EngineStats()
    stats.add(_ended(Outcome.DELIVERED, Reason.OK))
    metrics.observe(_carried(stats))

    assert _value("kvpush_stage_seconds_sum", role="receiver", stage="transfer") == pytest.approx(0.04)
    assert _value("kvpush_stage_seconds_count", role="receiver", stage="total") == 1


def test_what_went_wrong_is_counted_once_per_event() -> None:
    metrics, stats = _metrics({}), EngineStats()
    stats.add(Counted("late_message", Reason.RETIRED_TRANSFER))
    stats.refuse(Reason.BAD_MESSAGE)
    metrics.observe(_carried(stats))
    assert stats.take() is None

    assert _value("kvpush_events_total", event="late_message", reason="retired_transfer") == 1
    assert _value("kvpush_events_total", event="request_refused", reason="bad_message") == 1


def test_ranks_are_added_up() -> None:
    first, second = EngineStats(), EngineStats()
    for stats in (first, second):
        stats.add(_ended(Outcome.DELIVERED, Reason.OK))

    both = first.aggregate(second)

    assert both.reduce() == {"receiver delivered": 2, "receiver MB": 0.0}


def test_transfers_whose_prompts_are_computed_here_become_known_where_answers_are_given() -> None:
    metrics, worker, scheduler = _metrics({}), EngineStats(), EngineStats()
    worker.add(_ended(Outcome.FAILED, Reason.PEER_SILENT))
    scheduler.recompute(TransferId("lost"))
    arrived = worker.aggregate(scheduler)
    assert not RECOMPUTED.take("lost")

    metrics.observe(_carried(arrived))

    assert RECOMPUTED.take("lost")
    assert scheduler.take() is not None, "what has only this to tell is worth a report"
    assert scheduler.take() is None


def test_report_names_only_the_newest_of_very_many_transfers() -> None:
    both = EngineStats()
    for number in range(2):
        stats = EngineStats()
        for name in range(MOST_IDS):
            stats.recompute(TransferId(f"{number} {name}"))
        both.aggregate(stats)
    assert both.recomputed == [f"1 {name}" for name in range(MOST_IDS)]


def test_engine_shows_its_id_and_address_from_the_start() -> None:
    _metrics({"host": "10.0.0.7", "port": 7000})

    labels = {"engine_id": "e1", "host": "10.0.0.7", "port": "7000", "tp_size": "2", "role": "kv_producer"}
    assert _value("kvpush_engine_info", **labels, first_token="unused") == 1


def test_engine_whose_scheduler_begins_with_first_tokens_says_so() -> None:
    _metrics({"port": 7000}, scheduler=_SCHEDULER)
    assert 'first_token="used"' in generate_latest(REGISTRY).decode()


def test_data_parallel_engines_show_ids_and_ports_of_their_own() -> None:
    _metrics({"port": 7000}, engines=2)

    page = generate_latest(REGISTRY).decode()
    lines = [line for line in page.splitlines() if line.startswith("kvpush_engine_info{")]
    assert len(lines) == 2
    assert 'engine_id="e1_dp0"' in lines[0]
    assert 'port="7000"' in lines[0]
    assert 'engine_id="e1_dp1"' in lines[1]
    assert 'port="7002"' in lines[1]


def test_engine_with_a_free_port_shows_its_address_once_it_knows_it() -> None:
    metrics, stats = _metrics({"port": 0}), EngineStats()
    assert "kvpush_engine_info{" not in generate_latest(REGISTRY).decode()

    stats.listen = Address("127.0.0.1", 41000)
    metrics.observe(_carried(stats))

    labels = {"engine_id": "e1", "host": "127.0.0.1", "port": "41000", "tp_size": "2", "role": "kv_producer"}
    assert _value("kvpush_engine_info", **labels, first_token="unused") == 1


def test_modes_and_what_was_chosen_are_shown() -> None:
    metrics, stats = _metrics({}), EngineStats()
    stats.add(_ended(Outcome.DELIVERED, Reason.OK))
    stats.add(ModeChosen("p@10.0.0.1:5600", Mode.PULL, 1e9, 3e9))

    metrics.observe(_carried(stats))

    peer = {"peer": "p@10.0.0.1:5600"}
    assert _value("kvpush_delivered_total", role="receiver", mode="push") == 1
    assert [_value("kvpush_pair_mode", mode=mode, **peer) for mode in Mode] == [0, 1]
    assert [_value("kvpush_pair_bytes_per_second", mode=mode, **peer) for mode in Mode] == [1e9, 3e9]
