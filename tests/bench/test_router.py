"""The router's benchmark, small: real processes, real connections."""

import pytest
import uvloop

from kvpush.bench.fixed_engine import Timing, fixed_engines
from kvpush.bench.http_load import closed_loop
from kvpush.bench.router import RouterBench, Target, bench_router
from kvpush.core.errors import ConfigError


def test_fixed_engine_takes_its_time_and_streams_every_event() -> None:
    with fixed_engines(Timing(service_s=0.02, chunks=5, gap_s=0.002), engines=1) as (url,):
        timings, _ = uvloop.run(closed_loop(url, requests=8, concurrency=2))
    assert len(timings) == 8
    assert all(timing.ok and timing.events == 5 for timing in timings)
    assert min(timing.ttft_s for timing in timings) >= 0.019  # libuv's timers count whole milliseconds, begun ones too


def test_streams_that_are_spread_do_not_begin_together() -> None:
    """The last of four begins three quarters of the spread later."""
    with fixed_engines(Timing(service_s=0.001, chunks=2), engines=1) as (url,):
        timings, seconds = uvloop.run(closed_loop(url, requests=4, concurrency=4, spread_s=1.2))
    assert [timing.ok for timing in timings] == [True] * 4
    assert seconds > 0.89


def test_router_is_measured_beside_the_engine_alone() -> None:
    rows = bench_router(RouterBench(requests=200, concurrencies=(1, 4), rounds=1, chunks=4))
    ours = [row for row in rows if row.target is Target.KVPUSH]
    alone = [row for row in rows if row.target is Target.ALONE]
    assert [row.concurrency for row in ours] == [row.concurrency for row in alone] == [1, 4]
    assert not any(row.failed for row in rows)
    assert all(row.per_core for row in ours)
    assert ours[0].ttft_p50_ms > alone[0].ttft_p50_ms


def test_time_between_tokens_is_that_of_the_engine_alone_and_through_the_router() -> None:
    gap_ms = 40.0
    options = RouterBench(requests=20, concurrencies=(10,), rounds=1, chunks=5, gap_ms=gap_ms)
    alone, ours = (row for row in bench_router(options) if row.target is not Target.VLLM_ROUTER)
    assert (alone.target, ours.target) == (Target.ALONE, Target.KVPUSH)
    for row in (alone, ours):
        assert row.failed == 0
        # a machine that is busy may stretch a gap, but a median of zero would be answers that came in one piece
        assert gap_ms / 2 < row.itl_p50_ms <= row.itl_p99_ms
        assert row.events_per_s < 10 * 1e3 / gap_ms * 5 / 4


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"concurrencies": ()}, {"requests": -1}, {"gap_ms": -1.0}])
def test_benchmark_of_nothing_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        RouterBench(**settings)  # type: ignore[arg-type]
