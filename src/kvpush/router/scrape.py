"""Reading an engine's `/metrics`: a dozen values out of thousands of lines, by one regular expression.

A full Prometheus parser takes tens of milliseconds for one page of vLLM's, which every stream would feel.
Series of several data-parallel ranks are added up, except for usage (their mean).
"""

import re
from collections import defaultdict
from dataclasses import dataclass

from kvpush.core.ids import Address, EngineId, Target


@dataclass(frozen=True)
class SeenIdentity:
    """What a kvpush engine says of itself in the gauge `kvpush_engine_info`."""

    target: Target
    tp_size: int
    first_token: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One poll. Counts of requests, KV usage as a fraction; None where the engine has no such metric."""

    identity: SeenIdentity | None
    running: float | None
    waiting: float | None
    kv_usage: float | None
    total_blocks: int | None
    block_size: int | None
    started_at: float | None
    moved_tokens: float | None
    lost_prompts: float | None

    @property
    def free_blocks(self) -> float | None:
        """KV blocks that no request holds."""
        if self.kv_usage is None or self.total_blocks is None:
            return None
        return self.total_blocks * (1.0 - self.kv_usage)


FIRST_TOKEN_USED = "used"
"""What an engine says that begins answers with the first tokens of prefill engines."""

_INFO = "kvpush_engine_info"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"
_CACHE = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_HITS = "vllm:external_prefix_cache_hits_total"
_SOURCES = "vllm:prompt_tokens_by_source_total"
_EXTERNAL = "external_kv_transfer"
_TRANSFERS = "kvpush_transfers_total"
_WANTED_NO_MORE = "aborted"
_NAMES = "|".join((_INFO, _RUNNING, _WAITING, _USAGE, _CACHE, _STARTED, _HITS, _SOURCES, _TRANSFERS))
_LINE = re.compile(rf"^({_NAMES})(?:\{{(.*)\}})? ([^ \n]+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(page: str) -> Sample:
    """Read one `/metrics` page; lines that make no sense are as good as absent."""
    values: dict[str, list[float]] = defaultdict(list)
    labels: dict[str, list[dict[str, str]]] = defaultdict(list)
    for name, label_text, value in _LINE.findall(page):
        try:
            values[name].append(float(value))
        except ValueError:
            continue
        labels[name].append(dict(_LABEL.findall(label_text)))
    usage = values[_USAGE]
    return Sample(
        identity=next((seen for found in labels[_INFO] if (seen := _identity(found))), None),
        running=_total(values[_RUNNING]),
        waiting=_total(values[_WAITING]),
        kv_usage=sum(usage) / len(usage) if usage else None,
        total_blocks=_label_total(labels[_CACHE], "num_gpu_blocks"),
        block_size=_label_first(labels[_CACHE], "block_size"),
        started_at=max(values[_STARTED], default=None),
        moved_tokens=_moved(values, labels),
        lost_prompts=_lost(values, labels),
    )


def _total(values: list[float]) -> float | None:
    return sum(values) if values else None


def _moved(values: dict[str, list[float]], labels: dict[str, list[dict[str, str]]]) -> float | None:
    """Prompt tokens whose KV came from another engine, as counted when a prompt was done if vLLM says so."""
    by_source = zip(values[_SOURCES], labels[_SOURCES], strict=True)
    arrived = [value for value, found in by_source if found.get("source") == _EXTERNAL]
    return _total(arrived or values[_HITS])


def _lost(values: dict[str, list[float]], labels: dict[str, list[dict[str, str]]]) -> float | None:
    """Transfers to this engine that failed, but for those whose request had gone: None where no transfer has ended."""
    ended = zip(values[_TRANSFERS], labels[_TRANSFERS], strict=True)
    received = [(value, found) for value, found in ended if found.get("role") == "receiver"]
    lost = [value for value, found in received if _is_lost(found)]
    return sum(lost) if received else None


def _is_lost(labels: dict[str, str]) -> bool:
    return labels.get("outcome") != "delivered" and labels.get("reason") != _WANTED_NO_MORE


def _identity(labels: dict[str, str]) -> SeenIdentity | None:
    port, tp_size = labels.get("port", ""), labels.get("tp_size", "1")
    if not labels.get("host") or not port.isdecimal() or not tp_size.isdecimal():
        return None
    engine_id = EngineId(labels["engine_id"]) if labels.get("engine_id") else None
    target = Target(Address(labels["host"], int(port)), engine_id)
    return SeenIdentity(target, int(tp_size), labels.get("first_token", ""))


def _label_total(found: list[dict[str, str]], name: str) -> int | None:
    numbers = [int(labels[name]) for labels in found if labels.get(name, "").isdecimal()]
    return sum(numbers) if numbers else None


def _label_first(found: list[dict[str, str]], name: str) -> int | None:
    return next((int(labels[name]) for labels in found if labels.get(name, "").isdecimal()), None)
