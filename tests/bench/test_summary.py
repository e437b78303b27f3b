from pathlib import Path

import msgspec
import pytest
from bench.samples import ID, answer, pair_logs

from kvpush.bench.contenders import Contender
from kvpush.bench.cost import CellCost, Spent
from kvpush.bench.html import render
from kvpush.bench.load import Concurrency
from kvpush.bench.logs import RoundLogs
from kvpush.bench.machine import describe_machine
from kvpush.bench.metrics import Slo
from kvpush.bench.plan import Cell, Visit
from kvpush.bench.results import Failure, Report, Row, Sample, Text
from kvpush.bench.summary import expected_text, make_rows, make_samples
from kvpush.bench.trace import write_trace
from kvpush.bench.visit import Measured, Visited
from kvpush.bench.workload import Prompt, Shape
from kvpush.sim import profile

CELL = Cell(0, Shape(input_tokens=512, output_tokens=2), Concurrency(1))
COST = CellCost(2, 0.5, Spent(100.0, 120.0, 4, 50.0), Spent(200.0, 240.0, 8, 60.0))
PROMPTS = [Prompt((4, 5), 2), Prompt((6, 7), 2)]


def visited(contender: Contender, *ttfts: float) -> Visited:
    """Two answers with these TTFTs in seconds; the first of a pair's is in the logs."""
    answers = [answer(10.0 + 5 * i, 10.0 + 5 * i + ttft, 10.0 + 5 * i + ttft + 0.05) for i, ttft in enumerate(ttfts)]
    for other in answers[1:]:
        other.transfer_id = "cd" * 16
    logs = RoundLogs() if contender is Contender.SINGLE else pair_logs()
    return Visited(Visit(contender, 0), [Measured(CELL, PROMPTS, answers, COST)], {"router": 0.01}, logs)


@pytest.fixture
def visits() -> list[Visited]:
    return [
        visited(Contender.SINGLE, 0.3, 0.2),
        visited(Contender.KVPUSH_PUSH, 0.4, 0.3),
        visited(Contender.VLLM_PUSH, 0.6, 0.7),
    ]


@pytest.fixture
def samples(visits: list[Visited]) -> list[Sample]:
    return [sample for one in visits for sample in make_samples(one, one.cells[0], {})]


@pytest.fixture
def rows(visits: list[Visited], samples: list[Sample]) -> dict[str, Row]:
    return {row.connector: row for row in make_rows(visits, samples, Slo())}


def test_rows_have_figures_ratios_and_the_overhead_over_one_engine(rows: dict[str, Row]) -> None:
    slow = rows["vllm:push"]
    assert slow.ttft is not None
    assert slow.ttft.mean == pytest.approx(650)
    assert slow.ratios["ttft"].ratio == pytest.approx(650 / 350)
    assert slow.overhead_ms == pytest.approx(400)
    assert rows["kvpush:push"].ratios["ttft"].ratio == pytest.approx(1)
    assert rows["single"].overhead_ms is None
    assert slow.cost is not None
    assert (slow.cost.prefill_us_per_request, slow.cost.prefill_counted_us_per_request) == (50.0, 60.0)


def test_sample_has_its_split_and_transfer(samples: list[Sample]) -> None:
    pushed = [sample for sample in samples if sample.connector == "kvpush:push"]
    assert pushed[0].ttft_ms == pytest.approx(sum(pushed[0].split.values()), abs=0.05)
    assert (pushed[0].descriptors, pushed[0].nbytes) == (160, 1000)
    assert pushed[1].split == {}


def test_failed_answer_is_an_error_and_no_figure(visits: list[Visited]) -> None:
    broken = visits[1].cells[0].answers[1]
    broken.error, broken.chunks = "HTTP 500", ()
    made = [sample for one in visits for sample in make_samples(one, one.cells[0], {})]
    row = next(row for row in make_rows(visits, made, Slo()) if row.connector == "kvpush:push")
    assert (row.requests, row.errors) == (2, 1)
    assert row.ttft is not None
    assert row.ttft.mean == pytest.approx(400)
    assert row.overhead_ms == pytest.approx(100)


def test_texts_are_judged_one_by_one(visits: list[Visited]) -> None:
    right = {0: " w0004", 1: " w0005"}
    judged = make_samples(visits[0], visits[0].cells[0], right)
    assert [sample.text for sample in judged] == [Text.RIGHT, Text.WRONG]
    assert make_rows(visits[:1], judged, Slo())[0].wrong_texts == 1
    assert {sample.text for sample in make_samples(visits[0], visits[0].cells[0], {})} == {Text.UNCHECKED}


def test_expected_text_is_words_that_follow_the_prompt() -> None:
    text = expected_text(Prompt(tuple(range(10, 30)), 3), profile.load("ci"))
    assert len(text.split()) == 3
    assert text.startswith(" w")


def test_report_is_one_page_that_loads_nothing(visits: list[Visited], samples: list[Sample]) -> None:
    page = render(report(visits, samples))
    assert "Simulated device" in page
    assert "vllm:push" in page
    assert "prefill-0 has died" in page
    assert "<script src" not in page
    assert "<link" not in page
    assert page.count("plotly-graph-div") >= 4


def test_report_survives_its_own_json(visits: list[Visited], samples: list[Sample]) -> None:
    made = report(visits, samples)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Report) == made


def test_trace_has_a_lane_per_device_and_transfer_thread(tmp_path: Path, visits: list[Visited]) -> None:
    visits[1].logs.steps = {"prefill-0": visits[1].logs.prefill[ID].steps}
    write_trace(visits[1:2], tmp_path / "trace.json")
    events = msgspec.json.decode((tmp_path / "trace.json").read_bytes())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {
        "prefill-0",
        "prefill-0 engine thread",
        "P transfer thread",
        "D transfer thread",
        "kvpush:push: client",
    } <= names
    slices = [event for event in events if event["ph"] == "X"]
    assert {"request", "TTFT", "p_compute", "wire"} <= {event["name"] for event in slices}
    assert all(event["dur"] >= 0 for event in slices)
    instants = {event["name"] for event in events if event["ph"] == "i"}
    assert instants == {"launch", "arrival"}
    opened = [event for event in events if event["ph"] == "b"]
    assert {event["name"] for event in opened} >= {"posted", "noticed", "registered"}


def report(visits: list[Visited], samples: list[Sample]) -> Report:
    return Report(
        simulated=True,
        device="sim:ci",
        device_source="made up",
        command="kvpush bench compare",
        started="2026-01-01T00:00:00",
        seconds=1.0,
        commit="",
        versions={"vllm": "0.32"},
        machine=describe_machine(),
        seed=1,
        rounds=1,
        fragmented=False,
        prefix_share=0.0,
        slo=Slo(),
        saturation_per_s={},
        idle=[],
        failures=[Failure(connector="vllm:pull", round=0, error="prefill-0 has died")],
        summary=make_rows(visits, samples, Slo()),
        samples=samples,
    )
