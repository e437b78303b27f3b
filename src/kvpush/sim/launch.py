"""What to add to an engine's command line and environment, so that it runs on a simulated device."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvpush.sim import model, profile
from kvpush.sim.profile import Profile
from kvpush.sim.settings import SimSettings


@dataclass(frozen=True)
class Simulated:
    """Arguments for vLLM's API server and environment for its processes; `model` is a folder without weights."""

    model: Path
    vllm_args: tuple[str, ...]
    env: dict[str, str]


def launch_args(name: str, cache: Path | None = None) -> Simulated:
    """Prepare profile `name` (a name or a TOML file); its model folder is made in `cache` when it is missing.

    `cache` None is kvpush's cache folder. Raises `ConfigError` when there is no such profile.
    """
    chosen = profile.load(name)
    env = SimSettings(profile=name).to_env() | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return Simulated(_model_folder(chosen, cache or _default_cache()), _args(chosen), env)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("KVPUSH_CACHE") or Path(base) / "kvpush").expanduser()


def _model_folder(chosen: Profile, cache: Path) -> Path:
    geometry = f"l{chosen.layers}h{chosen.kv_heads}d{chosen.head_dim}v{chosen.vocabulary}p{chosen.max_model_len}"
    folder = cache / "sim" / f"{model.VERSION}-{geometry}-{chosen.dtype}"
    if not (folder / model.LAST_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        model.write_folder(folder, chosen)
    return folder


def _args(chosen: Profile) -> tuple[str, ...]:
    return (
        *("--worker-cls", "kvpush.sim.worker.SimWorker"),
        *("--dtype", chosen.dtype),
        *("--block-size", str(chosen.block_size)),
        *("--max-model-len", str(chosen.max_model_len)),
        *("--max-num-batched-tokens", str(chosen.max_batched_tokens)),
        *("--max-num-seqs", str(chosen.max_seqs)),
        *("--kv-cache-memory-bytes", str(1 << 30)),
        # one process, as on one GPU: vLLM's own choice for CPUs is two that spin while they wait for each other
        *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
        "--enforce-eager",
    )
