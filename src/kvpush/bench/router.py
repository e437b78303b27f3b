"""What a router adds: the same load against an engine of fixed speed, alone and through routers, in alternation."""

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import ExitStack, contextmanager, nullcontext
from enum import StrEnum
from statistics import median, quantiles
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
    """Requests are per target, concurrency and round. `gap_ms` 0 sends all of an answer's events at once; otherwise
    streams do not begin together."""

    requests: int = 400
    concurrencies: tuple[int, ...] = (1, 64, 200)
    rounds: int = 9
    service_ms: float = 10.0
    chunks: int = 32
    gap_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in ("requests", "rounds", "chunks", "service_ms"):
            if not getattr(self, field) > 0:
                raise ConfigError(
                    field, f"must be greater than 0, got {getattr(self, field)}", "Set a positive number."
                )
        if self.gap_ms < 0:
            raise ConfigError("gap_ms", f"{self.gap_ms} is no time", "Use 50, say, or 0 for all tokens at once.")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ConfigError("concurrencies", f"{self.concurrencies} is no list of loads", "Use 1,64,200, say.")


class RouterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One target at one concurrency: medians over the rounds.

    Milliseconds; ITL is between one event of an answer and the next. `per_core` is requests per second of the router's
    own CPU time, None for the engine alone.
    """

    target: Target
    concurrency: int
    requests: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    requests_per_s: float
    events_per_s: float
    per_core: float | None


class _Visit(msgspec.Struct):
    timings: list[StreamTiming]
    seconds: float
    cpu_s: float | None

    @property
    def good(self) -> list[StreamTiming]:
        return [timing for timing in self.timings if timing.ok and timing.events]


def bench_router(options: RouterBench, say: Callable[[str], None] = lambda line: None) -> list[RouterRow]:
    """Run it; `say` is told what happens. Raises `KVPushError` when a router does not start."""
    timing = Timing(service_s=options.service_ms / 1e3, chunks=options.chunks, gap_s=options.gap_ms / 1e3)
    visits: dict[tuple[int, Target], list[_Visit]] = {}
    targets = [target for target in Target if target is not Target.VLLM_ROUTER or shutil.which("vllm-router")]
    with ExitStack() as stack:
        prefill, decode = stack.enter_context(fixed_engines(timing, engines=2))
        started = {target: stack.enter_context(_started(target, prefill, decode)) for target in targets}
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            for concurrency in options.concurrencies:
                for target in _turned(targets, number):
                    visit = _visit(*started[target], options, concurrency)
                    visits.setdefault((concurrency, target), []).append(visit)
    return [_row(target, concurrency, found) for (concurrency, target), found in _in_order(visits, targets)]


def _in_order(
    visits: "dict[tuple[int, Target], list[_Visit]]", targets: list[Target]
) -> "list[tuple[tuple[int, Target], list[_Visit]]]":
    return sorted(visits.items(), key=lambda item: (item[0][0], targets.index(item[0][1])))


def _turned(targets: Sequence[Target], number: int) -> list[Target]:
    """Another target goes first in each round."""
    start = number % len(targets)
    return [*targets[start:], *targets[:start]]


def _visit(url: str, process: psutil.Process | None, options: RouterBench, concurrency: int) -> _Visit:
    import uvloop

    requests = max(options.requests, 2 * concurrency) if concurrency > 1 else max(options.requests // 5, 50)
    uvloop.run(closed_loop(url, min(concurrency * 2, 100), concurrency))
    before = _cpu_s(process)
    spread_s = options.gap_ms / 1e3 * options.chunks
    timings, seconds = uvloop.run(closed_loop(url, requests, concurrency, spread_s=spread_s))
    after = _cpu_s(process)
    return _Visit(timings, seconds, None if before is None or after is None else after - before)


def _cpu_s(process: psutil.Process | None) -> float | None:
    if process is None:
        return None
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(used.user + used.system for used in times))


def _row(target: Target, concurrency: int, visits: list[_Visit]) -> RouterRow:
    """Medians over the rounds: what else the machine does spoils some rounds, and pooling would keep that."""
    ttfts = [[timing.ttft_s * 1e3 for timing in visit.good] or [0.0] for visit in visits]
    gaps = [_gaps_ms(visit) or [0.0] for visit in visits]
    cores = [len(visit.timings) / visit.cpu_s for visit in visits if visit.cpu_s]
    return RouterRow(
        target=target,
        concurrency=concurrency,
        requests=sum(len(visit.timings) for visit in visits),
        failed=sum(len(visit.timings) - len(visit.good) for visit in visits),
        ttft_p50_ms=median(map(median, ttfts)),
        ttft_p99_ms=median(map(_p99, ttfts)),
        itl_p50_ms=median(map(median, gaps)),
        itl_p99_ms=median(map(_p99, gaps)),
        requests_per_s=median(len(visit.timings) / visit.seconds for visit in visits),
        events_per_s=median(sum(timing.events for timing in visit.good) / visit.seconds for visit in visits),
        per_core=median(cores) if cores else None,
    )


def _gaps_ms(visit: _Visit) -> list[float]:
    return [
        (after - before) * 1e3
        for timing in visit.good
        for before, after in zip(timing.arrivals_s, timing.arrivals_s[1:], strict=False)
    ]


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
