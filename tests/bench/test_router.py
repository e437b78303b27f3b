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
    assert all(timing.ttft_s >= 0.02 for timing in timings)


def test_router_is_measured_beside_the_engine_alone() -> None:
    rows = bench_router(RouterBench(requests=200, concurrencies=(1, 4), rounds=1, chunks=4))
    ours = [row for row in rows if row.target is Target.KVPUSH]
    alone = [row for row in rows if row.target is Target.ALONE]
    assert [row.concurrency for row in ours] == [row.concurrency for row in alone] == [1, 4]
    assert not any(row.failed for row in rows)
    assert all(row.per_core for row in ours)
    assert ours[0].ttft_p50_ms > alone[0].ttft_p50_ms


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"concurrencies": ()}, {"requests": -1}])
def test_benchmark_of_nothing_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        RouterBench(**settings)  # type: ignore[arg-type]
