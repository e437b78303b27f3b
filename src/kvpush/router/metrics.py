"""The router's own Prometheus metrics."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpush.router.asked import Local
from kvpush.router.dispatch import Path
from kvpush.router.engine import Engine
from kvpush.router.journey import Ending, Journey

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Owned by the event loop's thread."""

    def __init__(self, engines: Callable[[], Sequence[Engine]], waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_FleetCollector(engines, waiting))
        self._requests = Counter(
            "kvpush_router_requests",
            "Requests for tokens, by the path they took and how they ended.",
            ["path", "ending"],
            registry=self._registry,
        )
        self._local = Counter(
            "kvpush_router_local", "Requests without a prefill leg, by reason.", ["reason"], registry=self._registry
        )
        self._retries = Counter("kvpush_router_retries", "Tries after the first.", registry=self._registry)
        self._relayed = Counter(
            "kvpush_router_relayed", "Requests to other routes, passed to a decode engine.", registry=self._registry
        )
        self._turns = Counter(
            "kvpush_router_earlier_turns",
            "Requests whose prefill engine was told where an earlier turn is kept.",
            registry=self._registry,
        )
        self._reused = Counter(
            "kvpush_router_reused_tokens",
            "Prompt tokens that a prefill engine did not compute, because an earlier turn was kept elsewhere.",
            registry=self._registry,
        )
        self._first_tokens = Counter(
            "kvpush_router_first_token",
            "Streamed requests that took two engines, by what became of the prefill engine's first token.",
            ["outcome"],
            registry=self._registry,
        )
        self._first_byte = Histogram(
            "kvpush_router_first_byte_seconds",
            "From the request's arrival to the first byte of its answer.",
            ["path"],
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )

    def count(self, path: Path | None, ending: Ending, tries: int, local: Local | None) -> None:
        """One request has ended."""
        self._requests.labels(path or "none", ending).inc()
        self._retries.inc(max(tries - 1, 0))
        if path is Path.LOCAL and local is not None:
            self._local.labels(local).inc()

    def conversation(self, journey: Journey) -> None:
        """One request has ended, which may have been another turn."""
        if journey.trail and journey.trail[-1].reuse is not None:
            self._turns.inc()
            self._reused.inc(journey.trail[-1].reused_tokens)

    def first_token(self, journey: Journey) -> None:
        """One request has ended, whose first token may have been sent early."""
        if journey.trail and (fate := journey.trail[-1].first_token) is not None:
            self._first_tokens.labels(fate).inc()

    def first_byte(self, path: Path, seconds: float) -> None:
        """One answer has begun."""
        self._first_byte.labels(path).observe(seconds)

    def relayed(self) -> None:
        """One request has gone to a route the router does not know."""
        self._relayed.inc()

    def page(self) -> bytes:
        """The text for `/metrics`."""
        return generate_latest(self._registry)


class _FleetCollector(Collector):
    """Reads the engines' records when asked, so that no second copy of their state is kept."""

    def __init__(self, engines: Callable[[], Sequence[Engine]], waiting: Callable[[], int]) -> None:
        self._engines = engines
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        """All series of all engines."""
        names = ["role", "engine"]
        up = GaugeMetricFamily("kvpush_router_engine_up", "Whether the last poll worked.", labels=names)
        requests = GaugeMetricFamily("kvpush_router_engine_requests", "Requests in flight.", labels=names)
        tokens = GaugeMetricFamily("kvpush_router_engine_tokens", "Prompt tokens in flight.", labels=names)
        unwritten = GaugeMetricFamily(
            "kvpush_router_engine_unwritten_tokens", "Prompt tokens promised, KV not yet there.", labels=names
        )
        served = CounterMetricFamily("kvpush_router_legs", "Legs that ended well.", labels=names)
        failed = CounterMetricFamily("kvpush_router_failed_legs", "Legs that failed.", labels=[*names, "cause"])
        lost = CounterMetricFamily(
            "kvpush_router_engine_lost_prompts",
            "Prompts that did not come, by the engine's own count at the last poll.",
            labels=names,
        )
        breaker = GaugeMetricFamily(
            "kvpush_router_engine_breaker", "1 for the breaker's state.", labels=[*names, "state"]
        )
        for engine in self._engines():
            key = [str(engine.role), engine.url]
            up.add_metric(key, engine.sample is not None)
            requests.add_metric(key, engine.requests)
            tokens.add_metric(key, engine.tokens)
            unwritten.add_metric(key, engine.unwritten_tokens)
            served.add_metric(key, engine.served)
            breaker.add_metric([*key, engine.breaker.state], 1)
            if engine.sample is not None and engine.sample.lost_prompts is not None:
                lost.add_metric(key, engine.sample.lost_prompts)
            for cause, count in engine.failed.items():
                failed.add_metric([*key, cause], count)
        waiting = GaugeMetricFamily("kvpush_router_waiting", "Requests that wait for a decode engine.")
        waiting.add_metric([], self._waiting())
        return (up, requests, tokens, unwritten, served, failed, lost, breaker, waiting)
