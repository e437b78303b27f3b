"""vLLM's real scheduler with the real connector, and a worker that answers as it is told: no model, no device."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpush.core.commands import Command
from kvpush.core.events import Event
from kvpush.core.ids import Address, EngineId, Key, Target, TransferId
from kvpush.core.params import Reference, receive_params, send_params
from kvpush.runtime.counters import Counters
from kvpush.runtime.local import ThreadEnd
from kvpush.vllm.connector import KVPushConnector
from kvpush.vllm.metadata import RankAddress, RankReport
from kvpush.vllm.metrics import EngineStats
from kvpush.vllm.settings import Push

BLOCK = 16
BLOCKS = 64
_SAMPLED = 7
_TARGET = Target(Address("10.1.2.3", 5600), EngineId("prefill"))


class Overlap(Enum):
    """Whether a step may be scheduled while another one runs."""

    NONE = auto()
    ASYNC = auto()


@dataclass(frozen=True)
class Report:
    """What the worker side reports with a step."""

    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    sent: frozenset[str] = frozenset()
    more: RankReport | None = None


_NOTHING = Report()


def key_of(number: int) -> Key:
    """A key that is easy to recognize."""
    return Key(TransferId(f"{number:032x}"))


def sending(number: int, reuse: int | None = None) -> dict[str, Any]:
    """A prefill leg's parameters; `reuse`: the key of an earlier turn."""
    return send_params(key_of(number), None if reuse is None else Reference(key_of(reuse), _TARGET))


def receiving(number: int, keep: int | None = None) -> dict[str, Any]:
    """A decode leg's parameters; `keep`: the key under which to keep it for another turn."""
    return receive_params(key_of(number), _TARGET, keep=None if keep is None else key_of(keep))


class SchedulerRig:
    """A scheduler with 64 blocks of 16 tokens, stepped by hand."""

    def __init__(
        self,
        model: str,
        role: str = "kv_both",
        policy: str = "recompute",
        overlap: Overlap = Overlap.NONE,
        push: Push = Push.WHOLE,
        batched_tokens: int = 1024,
        scheduler: Callable[..., Scheduler] = Scheduler,
        **extra: Any,
    ) -> None:
        """`extra` goes into `kv_connector_extra_config`."""
        extra = {"push": push.value, "reserve_early": 0.0, **extra}
        self.config = _config(model, role, policy, extra, batched_tokens)
        # the CPU platform switches it off, whatever is asked for
        self.config.scheduler_config.async_scheduling = overlap is Overlap.ASYNC
        self.config.cache_config.num_gpu_blocks = BLOCKS
        self.scheduler = scheduler(
            vllm_config=self.config,
            kv_cache_config=_cache_config(BLOCKS),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.commands: list[Command] = []
        self.emitted: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.counters = Counters()
        self.recomputed: list[str] = []
        self.free_at_start = self.free_blocks

    @property
    def connector(self) -> KVPushConnector:
        """The connector's scheduler side."""
        connector = self.scheduler.connector
        assert isinstance(connector, KVPushConnector)
        return connector

    @property
    def free_blocks(self) -> int:
        """Blocks that vLLM could hand out."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, tokens: int, params: dict[str, Any] | None, **sampling: Any) -> Request:
        """Add a request with a prompt of `tokens` tokens of its own."""
        arguments: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True, **sampling}
        request = Request(
            request_id=name,
            prompt_token_ids=[hash((name.partition("#")[0], i)) % 1000 for i in range(tokens)],
            sampling_params=SamplingParams(extra_args={"kv_transfer_params": params}, **arguments),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def turn_away(self, params: dict[str, Any]) -> None:
        """vLLM's stand-in for a request that its API has turned away, or that has failed."""
        name = f"stand-in-{len(self.commands)}"
        request = Request(
            request_id=name,
            prompt_token_ids=[0],
            sampling_params=SamplingParams(extra_args={"kv_transfer_params": params}, max_tokens=1),
            pooling_params=None,
            abort_immediately=True,
        )
        self.scheduler.add_request(request)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, report: Report = _NOTHING) -> SchedulerOutput:
        """One step: schedule, pretend to compute, and take the worker's report in."""
        output = self.scheduler.schedule()
        self.commands += [*output.kv_connector_metadata.commands, *output.kv_connector_metadata.finals.finals]
        results = self.scheduler.update_from_output(output, computed(output, self.scheduler.requests, report))
        for result in results.values():
            self._note(result)
            if result.scheduler_stats and result.scheduler_stats.kv_connector_stats:
                stats = EngineStats(result.scheduler_stats.kv_connector_stats)
                self.counters.merge(stats.counters)
                self.recomputed += stats.recomputed
        return output

    def _note(self, result: EngineCoreOutputs) -> None:
        for output in result.outputs:
            self.emitted.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    def taken(self, kind: type[Command]) -> list[Any]:
        """The commands of one kind that have gone to the worker."""
        return [command for command in self.commands if isinstance(command, kind)]


class Ranks:
    """ThreadEnds of two ranks, and the scheduler that listens to them."""

    def __init__(self, rig: SchedulerRig) -> None:
        self.rig = rig
        self.threads = [ThreadEnd(), ThreadEnd()]
        ranks = [RankAddress(Address("127.0.0.1", 1), thread.path) for thread in self.threads]
        rig.connector.set_xfer_handshake_metadata_pp_aware({(0, index): rank for index, rank in enumerate(ranks)})

    def say(self, *events: Event, ranks: int = 2) -> None:
        """As many ranks as that say something."""
        for thread in self.threads[:ranks]:
            thread.send(events)

    def close(self) -> None:
        self.rig.connector.shutdown()
        for thread in self.threads:
            thread.close()


def reported(
    received: Iterable[str] = (),
    failed: Iterable[str] = (),
    sent: Iterable[str] = (),
    more: RankReport | None = None,
) -> Report:
    """A report; what has failed has been received, too, as vLLM wants it."""
    return Report(frozenset(received) | frozenset(failed), frozenset(failed), frozenset(sent), more)


def _config(model: str, role: str, policy: str, extra: dict[str, Any], batched_tokens: int) -> VllmConfig:
    transfer = {
        "kv_connector": "KVPushConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
    args = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,  # what the CPU backend takes; the rig's cache has its own
        max_model_len=1024,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=16,
        kv_transfer_config=transfer,
    )
    config = args.create_engine_config()
    config.cache_config.block_size = BLOCK
    return config


def _cache_config(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def computed(output: SchedulerOutput, requests: dict[str, Request], report: Report = _NOTHING) -> ModelRunnerOutput:
    """A step's result: the same token for each request whose prompt is complete."""
    names = list(output.num_scheduled_tokens)
    sampled = [[] if requests[name].num_computed_tokens < requests[name].num_tokens else [_SAMPLED] for name in names]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=sampled,
        kv_connector_output=KVConnectorOutput(
            finished_recving=set(report.received),
            failed_recving=set(report.failed),
            finished_sending=set(report.sent),
            kv_connector_worker_meta=report.more,
        ),
    )
