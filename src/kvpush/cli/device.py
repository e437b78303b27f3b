"""What the engines compute on, as vLLM's arguments and environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvpush.core.errors import ConfigError


@dataclass(frozen=True)
class DevicePlan:
    """`model` None means the one that the user asked for; a simulated device brings its own."""

    vllm_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    model: Path | None = None


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
            return DevicePlan()
        case ("sim", ":", profile) if profile:
            return _simulated(profile)
    raise ConfigError("device", f"'{name}' is not known", "Use cpu, vllm or sim:PROFILE.")


def _simulated(profile: str) -> DevicePlan:
    from kvpush.sim.launch import launch_args

    launch = launch_args(profile)
    return DevicePlan(launch.vllm_args, launch.env, launch.model)
