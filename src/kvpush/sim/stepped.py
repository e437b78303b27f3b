"""A real vLLM engine in this very process, stepped by hand: scheduler, worker and connector are all at hand.

That takes an environment with `VLLM_ENABLE_V1_MULTIPROCESSING=0` (see forked.py).
"""

import time
from collections.abc import Mapping
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

from kvpush.sim.orders import EngineConfig

_IDLE_S = 0.001


class SteppedEngine:
    """An engine whose requests go by the names that they were given. `stats` hears of each step."""

    def __init__(self, config: EngineConfig, stats: StatLoggerBase | None = None) -> None:
        loggers = [lambda *_: stats] if stats is not None else None
        self._engine = LLMEngine.from_engine_args(_arguments(config, stats), stat_loggers=loggers)
        self._internal: dict[str, str] = {}
        self.core = self._engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.connector: Any = self.scheduler.connector

    @property
    def is_busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.has_requests())

    @property
    def free_blocks(self) -> int:
        """Of the KV cache, those of the prefix cache included."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
        """A request has come."""
        self._internal[name] = self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def abort(self, name: str) -> None:
        """As vLLM's API server does when a client leaves; a request that has ended already is left alone."""
        if name in self._internal:
            self._engine.abort_request([self._internal.pop(name)], internal=True)

    def step(self) -> list[Any]:
        """Take one step; returns vLLM's outputs of the requests that it has finished."""
        outputs = self._engine.step()
        if not outputs:
            time.sleep(_IDLE_S)  # as vLLM's own loop does, so that the transfer thread gets the interpreter
        return [output for output in outputs if output.finished and self._internal.pop(output.request_id, None)]

    def shutdown(self) -> None:
        """As vLLM does."""
        self._engine.engine_core.shutdown()


def transfer_args(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A request's `kv_transfer_params` as `SamplingParams.extra_args`."""
    return {"kv_transfer_params": dict(params)} if params else None


def _arguments(config: EngineConfig, stats: StatLoggerBase | None) -> EngineArgs:
    transfer = {
        "kv_connector": "KVPushConnector",
        "kv_role": config.role,
        "engine_id": config.name,
        "kv_load_failure_policy": config.failure_policy,
        "kv_connector_extra_config": dict(config.extra),
    }
    return EngineArgs(
        model=config.model,
        dtype="float32",
        enforce_eager=True,
        block_size=config.block_size,
        enable_prefix_caching=config.prefix_caching,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        num_gpu_blocks_override=config.num_blocks,
        kv_transfer_config=transfer if config.role else None,
        disable_log_stats=stats is None,
        scheduler_cls=config.scheduler_cls,
        seed=0,
    )
