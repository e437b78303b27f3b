"""What the engines compute on, as vLLM's arguments and environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvpush.core.errors import ConfigError


@dataclass(frozen=True)
class DevicePlan:
    """`model` None means the one that the user asked for; a simulated device brings its own. `gpus` are the
    numbers of those that the engines share out among them."""

    vllm_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    model: Path | None = None
    gpus: tuple[int, ...] = ()


CPU = DevicePlan(
    # eager, because compiling takes longer than a test; float32, because bfloat16 is emulated on many CPUs
    vllm_args=("--enforce-eager", "--dtype", "float32"),
    env={"VLLM_CPU_KVCACHE_SPACE": "1"},
)


def plan_device(name: str) -> DevicePlan:
    """The plan for `cpu`, `vllm` (whatever vLLM finds, with its own defaults) or `sim:PROFILE`.

    Raises `ConfigError` for any other.
    """
    match name.partition(":"):
        case ("cpu", "", ""):
            return CPU
        case ("vllm", "", ""):
            return DevicePlan(gpus=nvidia_gpus())
        case ("sim", ":", profile) if profile:
            return _simulated(profile)
    raise ConfigError("device", f"'{name}' is not known", "Use cpu, vllm or sim:PROFILE.")


def nvidia_gpus(devices: Path = Path("/dev"), visible: str | None = None) -> tuple[int, ...]:
    """The numbers of this machine's NVIDIA GPUs, or those in `visible` (`CUDA_VISIBLE_DEVICES` when None)."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible
    if chosen:
        return tuple(int(number) for number in chosen.split(",") if number.strip().isdecimal())
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def _simulated(profile: str) -> DevicePlan:
    from kvpush.sim.launch import launch_args

    launch = launch_args(profile)
    return DevicePlan(launch.vllm_args, launch.env, launch.model)
