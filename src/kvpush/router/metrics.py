"""The router's own Prometheus metrics."""

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpush.router.engine import Engine


class Path(StrEnum):
    """Which way an answer came: the `x-kvpush-path` header and a counter's label."""

    PD = "pd"  # prefill engine and decode engine
    LOCAL = "local"  # the decode engine alone, on purpose
    RECOMPUTED = "recomputed"  # the decode engine alone, because prefill failed


class Ending(StrEnum):
    """How a request ended, as its client saw it."""

    COMPLETE = "complete"
    REFUSED = "refused"  # a complete error answer
    BROKEN_OFF = "broken_off"  # an error after the first byte
    CLIENT_LEFT = "client_left"


_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Owned by the event loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvpush_router_requests",
            "Requests for tokens, by the path they took and how they ended.",
            ["path", "ending"],
            registry=self.registry,
        )
        self.local = Counter(
            "kvpush_router_local",
            "Requests without a prefill leg, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.failed_legs = Counter(
            "kvpush_router_failed_legs",
            "Legs that failed, by role, engine and cause.",
            ["role", "engine", "cause"],
            registry=self.registry,
        )
        self.retries = Counter("kvpush_router_retries", "Second tries.", registry=self.registry)
        self.relayed = Counter(
            "kvpush_router_relayed",
            "Requests to other routes, passed to a decode engine.",
            registry=self.registry,
        )
        self.ttft = Histogram(
            "kvpush_router_first_byte_seconds",
            "From the request's arrival to the first byte of its answer.",
            ["path"],
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._engine_requests = Gauge(
            "kvpush_router_engine_requests", "Legs in flight.", ["role", "engine"], registry=self.registry
        )
        self._engine_up = Gauge(
            "kvpush_router_engine_up", "Whether the last poll worked.", ["role", "engine"], registry=self.registry
        )

    def page(self, engines: list[Engine]) -> bytes:
        """The text for `/metrics`."""
        for engine in engines:
            self._engine_requests.labels(engine.role, engine.url).set(engine.requests)
            self._engine_up.labels(engine.role, engine.url).set(engine.sample is not None)
        return generate_latest(self.registry)
