"""kvpush's counters on vLLM's way from the workers to `/metrics`.

Workers count (`EngineStats`, one per step in which something happened), vLLM carries that to the API server's
process, and `EngineMetrics` adds it up there. All figures are sums over the ranks of an engine: with tensor
parallelism a request counts once per rank. `kvpush_engine_info` says from the start where an engine's transfer thread
listens and under which id; with port 0 only from the first step on, because no one knows before.

The same way brings the API server the transfers whose prompts the engine has computed itself (recomputed.py).
"""

from typing import Any

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Ended, Event, ModeChosen, Outcome
from kvpush.core.ids import Address, TransferId
from kvpush.core.mode import Mode
from kvpush.runtime.counters import BOUNDS_S, STAGES, Counters
from kvpush.vllm.ranks import engine_group, ranks_per_engine
from kvpush.vllm.recomputed import RECOMPUTED, newest
from kvpush.vllm.settings import Settings, read_settings

_PREFIX = "kvpush_"


class _Payload(msgspec.Struct):
    """What travels: the counters, the durations of each stage of the transfers that ended, the address, and the ids of
    transfers whose prompts are computed here."""

    counters: dict[str, Any]
    seconds: list[tuple[str, str, float]]
    listen: tuple[str, int] | None = None
    recomputed: list[str] = []


class EngineStats(KVConnectorStats):
    """What has been counted in one interval. `data` is what vLLM carries; "" and empty when nothing was."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        payload = msgspec.convert(self.data, _Payload) if self.data else _Payload({}, [])
        self.counters = Counters.from_plain(payload.counters) if payload.counters else Counters()
        self.seconds = payload.seconds
        self.listen = Address(*payload.listen) if payload.listen else None
        self.recomputed = payload.recomputed

    def add(self, event: Event) -> None:
        """Count one event."""
        self.counters.add(event)
        if not isinstance(event, Ended) or event.record.outcome is not Outcome.DELIVERED:
            return
        at, role = event.record.at, event.record.role
        for name, first, last in STAGES[role]:
            if first in at and at.get(last, -1.0) >= at[first]:
                self.seconds.append((role, name, at[last] - at[first]))

    def refuse(self, reason: Reason) -> None:
        """Count a request whose parameters could not be used."""
        self.counters.add(Counted("request_refused", reason))

    def first_token(self, reason: Reason) -> None:
        """Count a request that began with its sender's first token (OK), or why it did not."""
        self.counters.add(Counted("first_token", reason))

    def recompute(self, transfer_id: TransferId) -> None:
        """Tell that this engine computes a prompt that it was to receive."""
        self.recomputed.append(transfer_id)

    def take(self) -> "EngineStats | None":
        """What has been counted since the last call, None for nothing."""
        if self.is_empty():
            return None
        taken = EngineStats(msgspec.to_builtins(self._payload()))
        self.reset()
        return taken

    def _payload(self) -> _Payload:
        listen = (self.listen.host, self.listen.port) if self.listen else None
        return _Payload(self.counters.to_plain(), self.seconds, listen, newest(self.recomputed))

    # vLLM's interface -----------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Builtin values only."""
        self.data = {} if self.is_empty() else msgspec.to_builtins(self._payload())
        return self.data

    def reset(self) -> None:
        """Start again from nothing."""
        self.counters, self.seconds, self.listen, self.data = Counters(), [], None, {}
        self.recomputed = []

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or interval's."""
        assert isinstance(other, EngineStats)
        self.counters.merge(other.counters)
        self.seconds = [*self.seconds, *other.seconds]
        self.listen = self.listen or other.listen
        self.recomputed = newest([*self.recomputed, *other.recomputed])
        self.to_dict()
        return self

    def reduce(self) -> dict[str, int | float]:
        """Figures for vLLM's periodic log line."""
        figures: dict[str, int | float] = {}
        for (role, outcome, _), number in self.counters.transfers.items():
            name = f"{role} {outcome}"
            figures[name] = figures.get(name, 0) + number
        for role, volume in self.counters.volumes.items():
            figures[f"{role} MB"] = round(volume.nbytes / 1e6, 1)
        return figures

    def is_empty(self) -> bool:
        """Whether there is nothing to carry."""
        return self.counters.empty and self.listen is None and not self.recomputed


class EngineMetrics(KVConnectorPromMetrics):
    """The API server's side: Prometheus metrics of one or more engines."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier_metrics()
        counter, histogram = metric_types[Counter], metric_types[Histogram]

        def count(name: str, text: str, *labels: str) -> Any:
            return counter(name=_PREFIX + name, documentation=text, labelnames=[*labelnames, *labels])

        self._transfers = count("transfers", "Transfers that have ended.", "role", "outcome", "reason")
        self._events = count("events", "What went otherwise than planned, and why.", "event", "reason")
        self._tokens = count("tokens", "Prompt tokens moved by delivered transfers.", "role")
        self._bytes = count("bytes", "Bytes moved by delivered transfers.", "role")
        self._reused = count("tokens_reused", "Prompt tokens not computed: an earlier turn had left them elsewhere.")
        self._descriptors = count("descriptors", "Descriptors of delivered transfers.", "role")
        self._modes = count("delivered", "Delivered transfers, by who moved the bytes.", "role", "mode")
        self._pairs = _Pairs(metric_types[Gauge], labelnames)
        self._idle = count("idle_block_seconds", "Blocks set aside for prompts, times the time until they had come.")
        self._seconds = histogram(
            name=f"{_PREFIX}stage_seconds",
            documentation="How long the stages of delivered transfers took.",
            labelnames=[*labelnames, "role", "stage"],
            buckets=list(BOUNDS_S),
        )
        self._info = _Info(vllm_config, metric_types[Gauge], labelnames)
        for engine, labels in per_engine_labelvalues.items():
            self._info.show(labels, engine, None)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's figures, and remember whose prompts were computed here."""
        stats, labels = EngineStats(transfer_stats_data), self.per_engine_labelvalues[engine_idx]
        for how, number in stats.counters.transfers.items():
            self._transfers.labels(*labels, *how).inc(number)
        for what, number in stats.counters.counted.items():
            self._events.labels(*labels, *what).inc(number)
        for role, volume in stats.counters.volumes.items():
            self._tokens.labels(*labels, role).inc(volume.tokens)
            self._reused.labels(*labels).inc(volume.reused)
            self._bytes.labels(*labels, role).inc(volume.nbytes)
            self._descriptors.labels(*labels, role).inc(volume.descriptors)
            self._idle.labels(*labels).inc(volume.idle_block_s)
        for moved_by, number in stats.counters.modes.items():
            self._modes.labels(*labels, *moved_by).inc(number)
        for chosen in stats.counters.pairs.values():
            self._pairs.show(labels, chosen)
        for role_name, stage, seconds in stats.seconds:
            self._seconds.labels(*labels, role_name, stage).observe(seconds)
        if stats.listen:
            self._info.show(labels, engine_idx, stats.listen)
        RECOMPUTED.note(stats.recomputed)


class _Pairs:
    """What `auto` has measured of each sender, and what it has chosen."""

    def __init__(self, gauge: Any, labelnames: list[str]) -> None:
        def show(name: str, text: str) -> Any:
            labels = [*labelnames, "peer", "mode"]
            return gauge(name=_PREFIX + name, documentation=text, multiprocess_mode="mostrecent", labelnames=labels)

        self._rate = show("pair_bytes_per_second", "How fast each mode has moved bytes from a sender.")
        self._chosen = show("pair_mode", "1 for the mode that is used with a sender, 0 for the other.")

    def show(self, labels: list[object], pair: ModeChosen) -> None:
        for mode, rate in ((Mode.PUSH, pair.push_rate), (Mode.PULL, pair.pull_rate)):
            self._rate.labels(*labels, pair.peer, mode).set(rate)
            self._chosen.labels(*labels, pair.peer, mode).set(mode is pair.mode)


class _Info:
    """`kvpush_engine_info`: always 1, its labels say who an engine is and where its transfer thread listens."""

    def __init__(self, config: VllmConfig, gauge: Any, labelnames: list[str]) -> None:
        self._config = config
        self._settings: Settings = read_settings(config.kv_transfer_config.kv_connector_extra_config)
        self._gauge = gauge(
            name=f"{_PREFIX}engine_info",
            documentation="An engine's kvpush id and control address.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "engine_id", "host", "port", "tp_size", "role", "first_token"],
        )

    def show(self, labels: list[object], engine: int, listen: Address | None) -> None:
        """Show `engine` at `listen`, or where the settings put it; not at all when only it itself knows."""
        address = listen or self._settings.address(self._group(engine), 0, ranks_per_engine(self._config))
        if not address.port:
            return
        transfer, parallel = self._config.kv_transfer_config, self._config.parallel_config
        # vLLM makes the ids of data parallel ranks differ in just this way, in each engine's process
        suffix = f"_dp{engine}" if parallel.data_parallel_size > 1 else ""
        names = (f"{transfer.engine_id}{suffix}", address.host, str(address.port))
        how = (str(parallel.tensor_parallel_size), transfer.kv_role, _first_token(self._config))
        self._gauge.labels(*labels, *names, *how).set(1)

    def _group(self, engine: int) -> int:
        return engine if self._config.parallel_config.data_parallel_size > 1 else engine_group(self._config)


def _first_token(config: VllmConfig) -> str:
    """Whether an engine's scheduler begins answers with the first tokens of prefill engines; routers rely on it."""
    chosen = config.scheduler_config.scheduler_cls
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", "")
    return "used" if name.rpartition(".")[2] == "FirstTokenScheduler" else "unused"


def exposition() -> str:
    """kvpush's lines of this process's metrics, as `/metrics` shows them."""
    lines = generate_latest(REGISTRY).decode().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(_PREFIX))


def _forget_earlier_metrics() -> None:
    """vLLM does the same for its own when a second engine is made in one process."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(_PREFIX):
            REGISTRY.unregister(collector)
