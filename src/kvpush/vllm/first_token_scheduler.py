"""`--scheduler-cls kvpush.vllm.first_token_scheduler.FirstTokenScheduler`: begins with the prefill engine's token.

For decode engines. When a prompt has come with the first token of its answer, the token goes to the client at once, and
the engine goes on with the second. For the worker, whose state begins with a request's first step here, the token is
the last one of the prompt; so what it is told of the request has one prompt token more and one output token less.

vLLM's scheduler has no stable interface. What is used of it is in this one file: `_update_request_with_output`,
`_free_request`, its queues of waiting requests, and the output of a step.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvpush.core.errors import ConfigError, Reason
from kvpush.vllm.connector import KVPushConnector
from kvpush.vllm.first_token import FirstToken, FirstTokens

_FIELD = "scheduler_cls"


class _Begins(Scheduler):
    """What is the same with and without overlapping steps."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._begun: set[str] = set()
        self._first_tokens = self._choose()

    def _choose(self) -> FirstTokens:
        if not isinstance(self.connector, KVPushConnector):
            remedy = "Set kv_connector to KVPushConnector in --kv-transfer-config, or leave --scheduler-cls out."
            raise ConfigError(_FIELD, "FirstTokenScheduler needs kvpush's connector", remedy)
        if self.num_spec_tokens:
            remedy = "Leave --scheduler-cls out."
            raise ConfigError(_FIELD, "FirstTokenScheduler cannot be used with speculative decoding", remedy)
        if self.use_v2_model_runner:
            raise ConfigError(
                _FIELD,
                "FirstTokenScheduler has not been tried with vLLM's V2 model runner",
                "Set VLLM_USE_V2_MODEL_RUNNER=0.",
            )
        first_tokens = self.connector.first_tokens
        first_tokens.use()
        return first_tokens

    # beginning ------------------------------------------------------------------------------------------
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a step's results in, and begin the requests whose prompts have come with their first tokens."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for first in self._first_tokens.take():
            request = self.requests.get(first.request_id)
            if request is None or not self._is_ready(request):
                self._first_tokens.unused(Reason.ABORTED)
                continue
            self._first_tokens.used()
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(self._begin(request, first))
        return outputs

    def _is_ready(self, request: Request) -> bool:
        """Whether its prompt has come, and nothing has been done with it."""
        name = request.request_id
        waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and name in self.finished_recving_kv_req_ids
        return waits and name not in self.failed_recving_kv_req_ids and not request.num_output_tokens

    def _begin(self, request: Request, first: FirstToken) -> EngineCoreOutput:
        """The output of a request's first step, which another engine has taken."""
        stats = request.take_prefill_stats()
        if stats is not None:
            stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)
        # stale: a step that nobody waits for any more
        tokens, stopped = self._update_request_with_output(request, [first.token], is_stale=True)
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            finish_reason=request.get_finished_reason() if stopped else None,
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=stats,
            trace_headers=request.trace_headers,
        )
        if stopped:
            output.kv_transfer_params = self._leave(request)
        else:
            self._begun.add(request.request_id)
        return output

    def _leave(self, request: Request) -> dict[str, Any] | None:
        """The first token was the last: the request never gets to run here. Its prompt may stay in the prefix cache."""
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        self.waiting.remove_requests([request])
        self.kv_holding_waiting.remove_requests([request])
        self.deferred_waiting.discard(request)
        self.finished_recving_kv_req_ids.discard(request.request_id)
        params: dict[str, Any] | None = self._free_request(request)[0]
        return params

    # what the worker is told ----------------------------------------------------------------------------
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step, in which the tokens that requests have begun with are prompt."""
        output = super().schedule(throttle_prefills)
        self._begun -= output.finished_req_ids
        if self._begun:
            self._lengthen_prompts(output)
        return output

    def _lengthen_prompts(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            if new.req_id in self._begun:
                request = self.requests[new.req_id]
                new.prompt_token_ids = list(request.all_token_ids[: request.num_prompt_tokens + 1])
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            if name in self._begun:
                cached.num_output_tokens[index] -= 1


class _Stepping(_Begins, Scheduler):
    """One step at a time."""


class _Overlapping(_Begins, AsyncScheduler):
    """The next step is scheduled while one runs."""


class FirstTokenScheduler:
    """Names whichever of the two the engine would use."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:
        """Make vLLM's scheduler, with first tokens. Raises `ConfigError` where they cannot be used."""
        overlaps = vllm_config.scheduler_config.async_scheduling
        return (_Overlapping if overlaps else _Stepping)(vllm_config, *args, **kwargs)
