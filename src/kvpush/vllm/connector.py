"""`KVPushConnector`: what vLLM calls. Each hook hands over to the scheduler's or the worker's side.

vLLM makes one of these in the scheduler's process and one in each worker. The layout of the cache is left to
the attention backend: any is read as it is (`get_required_kvcache_layout` stays None). Hybrid models are not
served by groups yet, so the connector does not declare `SupportsHMA`; vLLM then keeps whole prompts for sliding
window layers, which costs memory, and we say how much.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address, Key, Target
from kvpush.core.params import receive_params
from kvpush.runtime.local import SchedulerEnd
from kvpush.vllm.first_token import FirstTokens
from kvpush.vllm.lull import LONGEST_MS, Lull
from kvpush.vllm.metadata import RankAddress, StepCommands
from kvpush.vllm.metrics import EngineMetrics, EngineStats
from kvpush.vllm.ranks import engine_group, ranks_per_engine
from kvpush.vllm.reserve import Reserve
from kvpush.vllm.scheduler_side import SchedulerSide
from kvpush.vllm.settings import Push, read_settings
from kvpush.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KVPushConnector(KVConnectorBase_V1):
    """Pushes the KV cache of a prompt from the engine that computed it to the engine that decodes it."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._stats = EngineStats()
        self.first_tokens = FirstTokens(self._stats.first_token)
        push = _choose_push(settings.push, vllm_config)
        self._address = settings.address(engine_group(vllm_config), 0, ranks_per_engine(vllm_config))
        if role is KVConnectorRole.SCHEDULER:
            _check_supported(vllm_config)
            _check_caches(kv_cache_config)
            _warn_of_lost_capacity(kv_cache_config)
            sizes = tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
            reserve = Reserve(settings.reserve_early, min(sizes), vllm_config.model_config.max_model_len)
            self._scheduler = SchedulerSide(
                transfer,
                sizes,
                push,
                reserve,
                self.first_tokens,
                settings.keeping,
                ranks_per_engine(vllm_config),
                _choose_lull(vllm_config),
                self._stats.refuse,
                self._stats.recompute,
                self._free_blocks_of,
            )
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings, push, self._stats.add)

    # both sides -----------------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """End every transfer and the transfer thread."""
        if self._worker is not None:
            self._worker.stop()
        if self._scheduler is not None:
            self._scheduler.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this side has counted since the last call."""
        return self._stats.take()

    # API server -----------------------------------------------------------------------------------------
    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """What a worker has sent, as it was there."""
        return EngineStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """What `/metrics` shows."""
        return EngineMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # scheduler ------------------------------------------------------------------------------------------
    def on_new_request(self, request: "Request") -> None:
        """A request has been added to the scheduler."""
        self._scheduling.request_added(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens come from the sender, asynchronously; None: ask again later."""
        tokens = self._scheduling.remote_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Blocks have been allocated for a request."""
        self._scheduling.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The commands that ride on this step."""
        return self._scheduling.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Called before the scheduler acts on what the workers report."""
        self._scheduling.filter_output(connector_output)

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """The results of a step have been taken in. Of the cache there is nothing to tell."""
        self._scheduling.step_ended()
        return ()

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is done; keep its blocks if they are to be sent."""
        handover = self._scheduling.request_finished(request, (block_ids,))
        if handover is None:
            return False, None
        params = self._params_for_receiver(handover.key)
        return handover.keep, {**params, "reused_tokens": handover.reused} if handover.reused else params

    def _params_for_receiver(self, key: Key) -> dict[str, Any]:
        """For routers that run the legs one after the other and pass these on."""
        transfer = self._vllm_config.kv_transfer_config
        tp_size = self._vllm_config.parallel_config.tensor_parallel_size
        return receive_params(key, Target(self._address, transfer.engine_id), tp_size)

    def has_pending_push_work(self) -> bool:
        """Whether a step is needed though no request wants one."""
        return self._scheduling.needs_step

    def has_pending_block_frees(self) -> bool:
        """Whether blocks are about to be free, when a running request lacks one."""
        return self._scheduling.relieve_running()

    def reset_cache(self) -> bool | None:
        """The model has changed, for example. False while something that was kept is still there."""
        return self._scheduling.forget_kept()

    def _free_blocks_of(self, request: "Request") -> None:
        self._kv_cache_manager.free(request)

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """The scheduler's block pool exists."""
        self._scheduling.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers' addresses: that of the first one is the engine's. All of them are spoken to directly."""
        first = metadata.get((0, 0))
        if isinstance(first, RankAddress):
            self._address = first.address
        ranks = (metadata[place] for place in sorted(metadata))  # the order of `Rank.index`
        self._scheduling.connect(SchedulerEnd(getattr(rank, "local_path", "") for rank in ranks))

    # worker ---------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches exist: start the transfer thread."""
        self._working.start(kv_caches)
        if self._address.port == 0:
            self._stats.listen = self._working.address

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where this rank listens."""
        address: Address | None = self._working.address
        return None if address is None else RankAddress(address, self._working.local_path)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins; its commands are passed on before its forward pass is launched."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepCommands):
            self._working.begin_step(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        return self._working.results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler must know beyond the results."""
        return self._working.report()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing: loads have been running since `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only when all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer has been launched: it may be worth to send some layers ahead of the rest."""
        self._working.layer_launched(layer_name)

    def wait_for_save(self) -> None:
        """The forward pass has been launched: what it makes final is sent when the device is done with it. Waits for
        nothing."""
        self._working.forward_launched()

    # which side -----------------------------------------------------------------------------------------
    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler's hook was called in a worker"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a worker's hook was called in the scheduler"
        return self._worker


def _check_supported(config: VllmConfig) -> None:
    parallel = config.parallel_config
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field, 1) > 1:
            raise ConfigError(field, "spreads a block's tokens over ranks, which kvpush cannot follow", "Set it to 1.")


def _check_caches(cache_config: KVCacheConfig) -> None:
    """Refuse models whose fresh blocks vLLM zeroes, because their kernels read what nobody has written: the state of
    Mamba layers, or bytes that another group has left in another precision. vLLM leaves out blocks that wait for a
    load, so what is past the prompt in its last block would be somebody else's. All other kernels only read tokens
    that have been written."""
    if cache_config.needs_kv_cache_zeroing:
        problem = (
            "has Mamba layers or KV caches of several precisions, whose blocks must be zeroed before they are used"
        )
        remedy = "Serve it without kvpush, or with one kv_cache_dtype for all layers if it has no Mamba layers."
        raise ConfigError("model", problem, remedy)


def _choose_push(wanted: Push, config: VllmConfig) -> Push:
    """Draft layers are computed after the forward pass, and again when their draft is refused."""
    return wanted if config.speculative_config is None else Push.WHOLE


def _choose_lull(config: VllmConfig) -> Lull:
    """Data parallel ranks take their steps together: none may hold up the others."""
    longest_ms = LONGEST_MS if config.parallel_config.data_parallel_size == 1 else 0
    return Lull(config.max_concurrent_batches, longest_ms)


def _warn_of_lost_capacity(cache_config: KVCacheConfig) -> None:
    """Say once what it costs that vLLM has switched its hybrid cache manager off for us."""
    specs = [group.kv_cache_spec for group in cache_config.kv_cache_groups]
    windows = {spec.sliding_window for spec in specs if getattr(spec, "sliding_window", None)}
    if windows:
        logger.warning(
            "KVPushConnector keeps whole prompts for sliding window layers (window %s): requests longer than it "
            "take up more of the KV cache than without a connector.",
            ", ".join(str(window) for window in sorted(windows)),
        )
