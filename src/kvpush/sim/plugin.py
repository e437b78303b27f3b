"""The entry point that vLLM loads in each of its processes: lets a simulated device overlap steps as a GPU does.

vLLM switches asynchronous scheduling off on CPUs, where a forward pass blocks; the simulated device does not.
"""

import os
from typing import Any

from kvpush.sim.settings import is_simulated


def register() -> None:
    """Keep the user's choice of scheduling, in processes that run on a simulated device."""
    if not is_simulated(os.environ):
        return
    from vllm.platforms.cpu import CpuPlatform

    inner = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        inner(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    if inner.__module__ != __name__:
        CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
