"""What a stepped engine (see stepped.py) is, is told, and reports: plain values, pickled over a connection."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpush.runtime.counters import Counters


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to be. `role` "" is an engine without a connector; `extra` is its `kv_connector_extra_config`.

    `num_blocks` None leaves the size of the pool to vLLM. `environment` is of the engine's own process.
    """

    name: str
    model: str
    role: str = "kv_both"
    failure_policy: str = "fail"
    block_size: int = 32
    num_blocks: int | None = None
    prefix_caching: bool = True
    max_model_len: int = 4096
    max_num_batched_tokens: int = 4096
    max_num_seqs: int = 64
    scheduler_cls: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Order: a greedy request. `params` are its `kv_transfer_params`."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Leave:
    """Order: abort a request; one that has ended already is left alone."""

    name: str


@dataclass(frozen=True)
class Tell:
    """Order: send a `Standing`."""


@dataclass(frozen=True)
class End:
    """Order: shut down."""


@dataclass(frozen=True)
class Expose:
    """Order: send an `Exposed`."""


Order = Submit | Leave | Tell | Expose | End


@dataclass(frozen=True)
class Standing:
    """Report: how the engine stands. The first one says that it is up."""

    free_blocks: int
    requests: int
    counters: Counters


@dataclass(frozen=True)
class Finished:
    """Report: a request has ended by itself. `reason` is vLLM's; `cached` of its prompt tokens were not computed."""

    name: str
    tokens: tuple[int, ...]
    reason: str
    cached: int


@dataclass(frozen=True)
class Exposed:
    """Report: kvpush's lines of what the engine's `/metrics` would be."""

    text: str


Report = Standing | Finished | Exposed
