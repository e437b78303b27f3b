"""`--worker-cls kvpush.sim.worker.SimWorker`: vLLM's CPU worker with a modelled device."""

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from kvpush.sim import settings
from kvpush.sim.runner import SimModelRunner


class SimWorker(CPUWorker):
    """Everything but the forward pass is vLLM's own."""

    def init_device(self) -> None:
        """Set up the process as the CPU worker does, then put our runner in place of its own."""
        super().init_device()
        self.model_runner = SimModelRunner(self.vllm_config, torch.device("cpu"), settings.from_env())

    def compile_or_warm_up_model(self) -> Any:
        """There is nothing to compile."""
        from vllm.v1.worker.worker_base import CompilationTimes

        return CompilationTimes(language_model=0.0, encoder=0.0)
