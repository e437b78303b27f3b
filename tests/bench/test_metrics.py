import numpy as np
import pytest

from kvpush.bench import metrics
from kvpush.bench.client import Answer
from kvpush.bench.metrics import Slo


def answer(sent: float, *chunks: float, tokens: int | None = None, error: str = "") -> Answer:
    return Answer(
        request_id="r",
        sent=sent,
        ended=chunks[-1] if chunks else sent,
        chunks=chunks,
        output_tokens=len(chunks) if tokens is None else tokens,
        error=error,
    )


def test_times_are_those_of_one_request() -> None:
    one = answer(10.0, 10.2, 10.3, 10.5)
    assert metrics.ttft_ms(one) == pytest.approx(200)
    assert metrics.e2el_ms(one) == pytest.approx(500)
    assert metrics.tpot_ms(one) == pytest.approx(150)


def test_tpot_counts_tokens_and_itl_counts_chunks() -> None:
    two_in_one_chunk = answer(0.0, 0.1, 0.4, tokens=4)
    assert metrics.tpot_ms(two_in_one_chunk) == pytest.approx(100)
    assert metrics.values([two_in_one_chunk], "itl").tolist() == pytest.approx([300])


def test_figures_agree_with_those_of_vllm_bench_serve() -> None:
    """The same outputs through vLLM's own `calculate_metrics`."""
    serve = pytest.importorskip("vllm.benchmarks.serve")
    endpoint = pytest.importorskip("vllm.benchmarks.lib.endpoint_request_func")
    rng = np.random.default_rng(3)
    answers, outputs, requests = [], [], []
    for i in range(30):
        gaps = rng.uniform(0.01, 0.05, 9)
        chunks = i + 0.1 + np.cumsum(np.concatenate([[0.0], gaps]))
        answers.append(answer(float(i), *chunks.tolist()))
        outputs.append(
            endpoint.RequestFuncOutput(
                success=True,
                latency=float(chunks[-1] - i),
                ttft=float(chunks[0] - i),
                itl=gaps.tolist(),
                output_tokens=10,
                prompt_len=5,
                start_time=float(i),
            )
        )
        requests.append(serve.SampleRequest(prompt="", prompt_len=5, expected_output_len=10))
    theirs, _ = serve.calculate_metrics(
        requests, outputs, 30.0, None, [50.0, 90.0, 99.0], goodput_config_dict={"ttft": 120.0}
    )
    for metric in ("ttft", "tpot", "itl"):
        ours = metrics.figures(metrics.values(answers, metric))
        assert ours is not None
        assert ours.mean == pytest.approx(getattr(theirs, f"mean_{metric}_ms"))
        assert ours.median == pytest.approx(getattr(theirs, f"median_{metric}_ms"))
        assert dict(getattr(theirs, f"percentiles_{metric}_ms"))[99.0] == pytest.approx(ours.p99)


def test_failed_answers_count_for_nothing() -> None:
    mixed = [answer(0.0, 0.1, 0.2), answer(0.0, 9.0, error="cut"), answer(0.0, error="HTTP 500")]
    assert len(metrics.values(mixed, "ttft")) == 1
    assert metrics.figures(metrics.values(mixed[2:], "itl")) is None


def test_goodput_counts_only_requests_within_the_slo() -> None:
    answers = [answer(0.0, 0.1, 0.11), answer(0.0, 0.5, 0.51), answer(0.0, 0.1, 0.3), answer(1.0, 2.0, error="x")]
    assert metrics.goodput(answers, Slo(ttft_ms=200, tpot_ms=50)) == pytest.approx(1 / 2)
    assert metrics.goodput([], Slo()) == 0.0


def test_ratio_of_pairs_has_an_interval_around_it() -> None:
    rng = np.random.default_rng(1)
    ours = rng.uniform(50, 150, 200)
    ratio = metrics.paired_ratio(ours, ours * 2 + rng.normal(0, 5, 200))
    assert ratio is not None
    assert ratio.low < ratio.ratio < ratio.high
    assert ratio.ratio == pytest.approx(2, rel=0.03)
    assert ratio.high - ratio.low < 0.05  # pairs take out what differs between prompts


def test_no_ratio_without_pairs() -> None:
    assert metrics.paired_ratio(np.array([]), np.array([])) is None
    assert metrics.paired_ratio(np.array([1.0]), np.array([1.0, 2.0])) is None
