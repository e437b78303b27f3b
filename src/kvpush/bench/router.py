"""What a router adds: the same load against an engine of fixed speed, alone and through routers, in alternation."""

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from statistics import fmean, median, quantiles
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
import psutil

from kvpush.bench.fixed_engine import Timing, fixed_engines
from kvpush.bench.http_load import StreamTiming, closed_loop
from kvpush.core.errors import ConfigError, KVPushError

START_TIMEOUT_S = 60.0


class Target(StrEnum):
    """What the load is sent to."""

    ALONE = "engine alone"
    KVPUSH = "kvpush router"
    VLLM_ROUTER = "vllm-router"


class RouterBench(msgspec.Struct, frozen=True, kw_only=True):
    """Requests are per target, concurrency and round. `gap_ms` 0 sends all of an answer's events at once."""

    requests: int = 1000
    concurrencies: tuple[int, ...] = (1, 64, 200)
    rounds: int = 3
    service_ms: float = 10.0
    chunks: int = 32
    gap_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in ("requests", "rounds", "chunks", "service_ms"):
            if not getattr(self, field) > 0:
                raise ConfigError(
                    field, f"must be greater than 0, got {getattr(self, field)}", "Set a positive number."
                )
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ConfigError("concurrencies", f"{self.concurrencies} is no list of loads", "Use 1,64,200, say.")


class RouterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One target at one concurrency, over all rounds.

    Milliseconds; `gap_ms` is between one event of an answer and the next. `per_core` is requests per second of the
    router's own CPU time, None for the engine alone.
    """

    target: Target
    concurrency: int
    requests: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    requests_per_s: float
    events_per_s: float
    per_core: float | None


class _Visit(msgspec.Struct):
    timings: list[StreamTiming]
    seconds: float
    cpu_s: float | None


def bench_router(options: RouterBench, say: Callable[[str], None] = lambda line: None) -> list[RouterRow]:
    """Run it; `say` is told what happens. Raises `KVPushError` when a router does not start."""
    timing = Timing(service_s=options.service_ms / 1e3, chunks=options.chunks, gap_s=options.gap_ms / 1e3)
    visits: dict[tuple[Target, int], list[_Visit]] = {}
    targets = [target for target in Target if target is not Target.VLLM_ROUTER or shutil.which("vllm-router")]
    with fixed_engines(timing, engines=2) as (prefill, decode):
        for number in range(options.rounds):
            for target in _turned(targets, number):
                say(f"round {number + 1} of {options.rounds}: {target}")
                with _started(target, prefill, decode) as (url, process):
                    for concurrency in options.concurrencies:
                        visit = _visit(url, process, options, concurrency)
                        visits.setdefault((target, concurrency), []).append(visit)
    return [_row(*key, visits[key]) for key in sorted(visits, key=lambda key: (key[1], targets.index(key[0])))]


def _turned(targets: Sequence[Target], number: int) -> list[Target]:
    """Another target goes first in each round."""
    start = number % len(targets)
    return [*targets[start:], *targets[:start]]


def _visit(url: str, process: psutil.Process | None, options: RouterBench, concurrency: int) -> _Visit:
    import uvloop

    requests = options.requests if concurrency > 1 else max(options.requests // 5, 50)
    uvloop.run(closed_loop(url, min(concurrency * 2, 100), concurrency))
    before = _cpu_s(process)
    timings, seconds = uvloop.run(closed_loop(url, requests, concurrency))
    after = _cpu_s(process)
    return _Visit(timings, seconds, None if before is None or after is None else after - before)


def _cpu_s(process: psutil.Process | None) -> float | None:
    if process is None:
        return None
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(used.user + used.system for used in times))


def _row(target: Target, concurrency: int, visits: list[_Visit]) -> RouterRow:
    timings = [timing for visit in visits for timing in visit.timings]
    good = [timing for timing in timings if timing.ok and timing.events]
    ttft = [timing.ttft_s * 1e3 for timing in good] or [0.0]
    gaps = [(b - a) * 1e3 for timing in good for a, b in zip(timing.arrivals_s, timing.arrivals_s[1:], strict=False)]
    seconds = sum(visit.seconds for visit in visits)
    cpu_s = sum(visit.cpu_s or 0.0 for visit in visits)
    return RouterRow(
        target=target,
        concurrency=concurrency,
        requests=len(timings),
        failed=len(timings) - len(good),
        ttft_p50_ms=median(ttft),
        ttft_p99_ms=_p99(ttft),
        gap_p50_ms=median(gaps or [0.0]),
        gap_p99_ms=_p99(gaps or [0.0]),
        requests_per_s=fmean(len(visit.timings) / visit.seconds for visit in visits),
        events_per_s=sum(timing.events for timing in good) / seconds,
        per_core=len(timings) / cpu_s if cpu_s else None,
    )


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]


def _started(target: Target, prefill: str, decode: str) -> Context[tuple[str, psutil.Process | None]]:
    if target is Target.ALONE:
        return nullcontext((decode, None))
    return _router(target, prefill, decode)


@contextmanager
def _router(target: Target, prefill: str, decode: str) -> Iterator[tuple[str, psutil.Process | None]]:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        _argv(target, prefill, decode, port), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_ready(url, process)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate()


def _argv(target: Target, prefill: str, decode: str, port: int) -> list[str]:
    if target is Target.KVPUSH:
        argv = [sys.executable, "-m", "kvpush.cli", "router", "--self-check", "off", "--log-level", "warning"]
        return [*argv, "--prefill", prefill, "--decode", decode, "--port", str(port)]
    argv = ["vllm-router", "--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "error"]
    return [*argv, "--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", str(port)]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(url: str, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            stderr = process.stderr.read()[-2000:] if process.stderr else ""
            raise KVPushError(f"{process.args!r} ended with status {process.returncode}: {stderr}")
        try:
            with urlopen(url + "/health", timeout=2.0) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.1)
    raise KVPushError(f"{process.args!r} was not ready within {START_TIMEOUT_S:g} s")


def run_closed_loop(url: str, requests: int, concurrency: int) -> list[StreamTiming]:
    """The load alone, for tests and for measuring something else with it."""
    return asyncio.run(closed_loop(url, requests, concurrency))[0]
