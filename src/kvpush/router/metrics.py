"""The router's own Prometheus metrics: what one process counts, and the page for all processes on its port."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpush.router.asked import Local
from kvpush.router.dispatch import Path
from kvpush.router.engine import Engine
from kvpush.router.journey import Ending, Journey
from kvpush.router.tally import Count, Tally, counts_of
from kvpush.router.view import EngineView, view

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Owned by the event loop's thread. Of the engines it counts nothing: their records are read when asked."""

    def __init__(self, engines: Callable[[], Sequence[Engine]], waiting: Callable[[], int]) -> None:
        self._engines = engines
        self._waiting = waiting
        self._registry = CollectorRegistry()
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

    def tally(self) -> Tally:
        """What this process has counted."""
        engines = [view(engine) for engine in self._engines()]
        return Tally(engines, self._waiting(), counts_of(self._registry.collect()))

    def page(self, tally: Tally) -> bytes:
        """The text for `/metrics`, from the tally of all processes."""
        registry = CollectorRegistry()
        registry.register(_Collector([*_of_engines(tally.engines), _of_waiting(tally.waiting)]))
        registry.register(_Collector(_filled(self._registry.collect(), tally.counts)))
        return generate_latest(registry)


class _Collector(Collector):
    """Families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families


def _filled(families: Iterable[Metric], counts: Iterable[Count]) -> list[Metric]:
    """The same families with these counts instead of their own."""
    empty = {family.name: Metric(family.name, family.documentation, family.type) for family in families}
    for count in counts:
        empty[count.family].add_sample(count.name, dict(count.labels), count.value)
    return list(empty.values())


def _of_waiting(waiting: int) -> Metric:
    return GaugeMetricFamily("kvpush_router_waiting", "Requests that wait for a decode engine.", value=waiting)


def _of_engines(engines: Iterable[EngineView]) -> tuple[Metric, ...]:
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
    breaker = GaugeMetricFamily("kvpush_router_engine_breaker", "1 for the breaker's state.", labels=[*names, "state"])
    for engine in engines:
        key = [str(engine.role), engine.url]
        up.add_metric(key, engine.is_up)
        requests.add_metric(key, engine.requests)
        tokens.add_metric(key, engine.tokens)
        unwritten.add_metric(key, engine.unwritten_tokens)
        served.add_metric(key, engine.served)
        breaker.add_metric([*key, engine.breaker], 1)
        if engine.lost_prompts is not None:
            lost.add_metric(key, engine.lost_prompts)
        for cause, count in engine.failed.items():
            failed.add_metric([*key, cause], count)
    return (up, requests, tokens, unwritten, served, failed, lost, breaker)
