"""vLLM's model runner with the forward pass taken out: real blocks, real connector, a modelled device."""

import time
from typing import Any

import torch
from torch import nn
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from kvpush.sim import device
from kvpush.sim.batch import Batch, cost_tokens
from kvpush.sim.device import Step, Stream
from kvpush.sim.memory import KVMemory, Tensor
from kvpush.sim.model import SimModel
from kvpush.sim.settings import ALONE, SimSettings
from kvpush.sim.steplog import StepLog
from kvpush.vllm import device as adapter
from kvpush.vllm.device import simulate


class SimBackend(CPUAttentionBackend):
    """The layout of the CPU backend, without the block sizes that its kernels insist on: there are none."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any."""
        return [MultipleOf(1)]


class SimOutput(AsyncModelRunnerOutput):
    """A launched step's output; complete once the device has sampled."""

    def __init__(self, step: Step, connector_output: Any) -> None:
        self._step = step
        self._connector_output = connector_output

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the device."""
        tokens = self._step.tokens()
        ids = [row.request_id for row in self._step.rows]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[tokens[i]] if i in tokens else [] for i in ids],
            kv_connector_output=self._connector_output,
        )


class SimModelRunner(CPUModelRunner):
    """Keeps its own request state; of its base class it uses only what sets up the KV cache."""

    def __init__(self, vllm_config: Any, device: torch.device, settings: SimSettings) -> None:
        super().__init__(vllm_config, device)
        self._settings = settings
        self._profile = settings.load_profile()
        self._batch = Batch()
        self._launched: SimOutput | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Declare the attention layers, from which vLLM derives the KV cache; there are no weights."""
        config = self.model_config
        heads = config.get_num_attention_heads(self.parallel_config)
        kv_heads = config.get_num_kv_heads(self.parallel_config)
        head_dim = config.get_head_size()
        self.model = nn.ModuleList(
            Attention(
                heads,
                head_dim,
                head_dim**-0.5,
                num_kv_heads=kv_heads,
                cache_config=self.cache_config,
                attn_backend=SimBackend,
                prefix=f"model.layers.{layer}.self_attn.attn",
            )
            for layer in range(config.hf_config.num_hidden_layers)
        )

    def get_supported_generation_tasks(self) -> list[Any]:
        """What the API server may offer."""
        return ["generate"]

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Let vLLM allocate the cache, and start the device on it."""
        caches: dict[str, torch.Tensor] = super().initialize_kv_cache_tensors(*args, **kwargs)
        self._layers = list(caches.items())
        model = SimModel(_memory(list(caches.values())), self._profile.vocabulary, self._settings.verify)
        transfer = self.vllm_config.kv_transfer_config
        self._log = StepLog(self._settings.steps_file(transfer.engine_id if transfer else ALONE))
        self._stream = Stream(model, self._log.step_finished)
        device.set_current_stream(self._stream)
        adapter.simulate(self._stream.record_event)
        simulate(self._stream.record_event)
        return caches

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> ModelRunnerOutput | None:
        """Launch one step and return while the device works."""
        if has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        rows = self._batch.rows(scheduler_output)
        if not rows:
            return self._no_forward(scheduler_output)
        with (
            set_forward_context({}, self.vllm_config, num_tokens=scheduler_output.total_num_scheduled_tokens),
            self.maybe_get_kv_connector_output(scheduler_output) as connector_output,
        ):
            time.sleep(self._profile.launch_us / 1e6)
            step = self._stream.launch(rows, self._profile.step_s(*cost_tokens(rows)))
            self._call_layer_hooks()
        self._launched = SimOutput(step, connector_output)
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """The step's tokens: now, or, with async scheduling, when they are asked for."""
        launched, self._launched = self._launched, None
        if launched is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return launched if self.use_async_scheduling else launched.get_output()

    def _no_forward(self, scheduler_output: Any) -> ModelRunnerOutput:
        if not has_kv_transfer_group():
            return EMPTY_MODEL_RUNNER_OUTPUT
        output: ModelRunnerOutput = self.kv_connector_no_forward(scheduler_output, self.vllm_config)
        return output

    def _call_layer_hooks(self) -> None:
        """As the launch of each attention layer does: while metadata is bound. The host is ahead of the device: an
        event that a connector records in a hook fires at the layer's modelled time."""
        if not has_kv_transfer_group():
            return
        connector = get_kv_transfer_group()
        for layer, (name, cache) in enumerate(self._layers):
            listens = connector.has_connector_metadata()
            if listens:
                connector.wait_for_layer_load(name)
            self._stream.at_layer(layer, len(self._layers))
            if listens:
                connector.save_kv_layer(name, cache, None)


def _memory(caches: list[torch.Tensor]) -> KVMemory:
    storage = caches[0].untyped_storage()
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
    return KVMemory(buffer.numpy(), [_tensor(cache, storage.data_ptr()) for cache in caches])


def _tensor(cache: torch.Tensor, base: int) -> Tensor:
    """vLLM's cache view [block, head, token, content] as bytes."""
    if cache.dim() != 4 or cache.stride(3) != 1:
        raise ValueError(f"unexpected KV cache of shape {tuple(cache.shape)} and strides {cache.stride()}")
    size = cache.element_size()
    block, head, token = (cache.stride(i) * size for i in range(3))
    shape = (cache.shape[0], cache.shape[1], cache.shape[2], cache.shape[3] * size)
    return Tensor(cache.data_ptr() - base, shape, (block, head, token))
