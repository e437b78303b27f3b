"""What a cluster consists of: each part's command, environment and addresses, planned before anything starts."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from kvpush.cli.device import CPU, DevicePlan
from kvpush.cli.ports import free_ports
from kvpush.core.errors import ConfigError
from kvpush.router.config import Connector, ConversationMode, EngineRole


class LoadFailurePolicy(StrEnum):
    """What a decode engine does with a request whose transfer has failed; vLLM's words."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Share:
    """What one engine may compute on: CPU cores as a list ("0,2-3"), GPUs likewise, "" without any."""

    cores: str
    gpus: str = ""


_VLLM_NAMES = {
    Connector.KVPUSH: "KVPushConnector",
    Connector.VLLM_PUSH: "NixlPushConnector",
    Connector.VLLM_PULL: "NixlConnector",
}
FIRST_TOKEN_SCHEDULER = "kvpush.vllm.first_token_scheduler.FirstTokenScheduler"
FIRST_TOKEN_ARGS = ("--scheduler-cls", FIRST_TOKEN_SCHEDULER)
"""What lets a decode engine begin with the token that the prefill engine has sampled."""
PATH_ARGS = ("--middleware", "kvpush.vllm.path_header.PathHeader")
"""What lets a decode engine's answers say that it has computed the prompt itself."""
FORWARD_ARGS = ("--first-token", "forward")
"""What lets a router send that token to clients before the decode engine has the prompt."""

_PORTS_PER_ENGINE = 16  # API, then the side channel: rank r listens on its base port + r


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """What to start.

    `model` is a checkpoint's folder, known to clients as `served_name`. `port` is the router's, 0 picks a free one.
    `connector_config` goes to the connector as `kv_connector_extra_config`; `vllm_args` and `env` to every engine,
    `router_args` to `kvpush router`. `block_size` None is vLLM's default. `conversations`: whether decode engines keep
    answers for the next turn. Times in seconds, memory in GiB.
    """

    model: Path
    log_dir: Path
    served_name: str = ""
    prefill: int = 1
    decode: int = 1
    connector: Connector = Connector.KVPUSH
    device: DevicePlan = CPU
    host: str = "127.0.0.1"
    port: int = 0
    block_size: int | None = None
    conversations: ConversationMode = ConversationMode.OFF
    connector_config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.FAIL
    vllm_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.connector is Connector.NONE and self.prefill:
            raise ConfigError("prefill", f"{self.prefill} with --connector none, which has no transfers", "Use 0.")
        if self.connector is not Connector.NONE and self.prefill < 1:
            raise ConfigError("prefill", f"{self.prefill} engines", "Use at least 1, or --connector none.")
        if self.decode < 1:
            raise ConfigError("decode", f"{self.decode} engines", "Use at least 1.")
        if not 0 <= self.port < 65536:
            raise ConfigError("port", f"{self.port} is no TCP port", "Use 1..65535, or 0 for any free one.")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError("block_size", f"{self.block_size} tokens", "Use at least 1, or leave it out.")


@dataclass(frozen=True)
class Engine:
    """One engine of a cluster: its name is also its `engine_id`; `kv_port` is 0 without a connector."""

    name: str
    role: EngineRole
    host: str
    port: int
    kv_port: int

    @property
    def url(self) -> str:
        """The base URL of its OpenAI API."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class Command:
    """A process to be: its arguments, and what it has in its environment beyond ours."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def plan_engines(spec: ClusterSpec) -> tuple[Engine, ...]:
    """Name the engines and find their ports. Raises `ConfigError` when too few ports are free."""
    roles = [EngineRole.PREFILL] * spec.prefill + [EngineRole.DECODE] * spec.decode
    bases = free_ports(len(roles), _PORTS_PER_ENGINE, spec.host)
    has_kv = spec.connector is not Connector.NONE
    engines = []
    for i, (role, base) in enumerate(zip(roles, bases, strict=True)):
        number = i if role is EngineRole.PREFILL else i - spec.prefill
        engines.append(Engine(f"{role}-{number}", role, spec.host, base, base + 1 if has_kv else 0))
    return tuple(engines)


def engine_command(spec: ClusterSpec, engine: Engine, share: Share) -> Command:
    """How one engine is started on its share of the machine."""
    by_role = spec.prefill_args if engine.role is EngineRole.PREFILL else spec.decode_args
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(spec.device.model or spec.model)),
        *("--served-model-name", spec.served_name or spec.model.name),
        *("--host", engine.host, "--port", str(engine.port)),
        *("--disable-access-log-for-endpoints", "/health,/metrics"),
        *spec.device.vllm_args,
        *(("--block-size", str(spec.block_size)) if spec.block_size else ()),
        *_transfer_args(spec, engine),
        *(PATH_ARGS if spec.connector is Connector.KVPUSH and engine.role is EngineRole.DECODE else ()),
        *spec.vllm_args,
        *by_role,
    ]
    return Command(tuple(argv), _engine_env(spec, engine, share))


def _transfer_args(spec: ClusterSpec, engine: Engine) -> Sequence[str]:
    if spec.connector is Connector.NONE:
        return ()
    config = {
        "kv_connector": _VLLM_NAMES[spec.connector],
        "kv_role": _kv_role(spec, engine.role),
        "engine_id": engine.name,
        "kv_load_failure_policy": spec.load_failure_policy,
    }
    if spec.connector_config:
        return (
            "--kv-transfer-config",
            json.dumps({**config, "kv_connector_extra_config": dict(spec.connector_config)}),
        )
    return ("--kv-transfer-config", json.dumps(config))


def _kv_role(spec: ClusterSpec, role: EngineRole) -> str:
    match spec.connector:
        case Connector.KVPUSH if spec.conversations is ConversationMode.ON:
            return "kv_both"
        case Connector.KVPUSH | Connector.VLLM_PUSH:
            return "kv_producer" if role is EngineRole.PREFILL else "kv_consumer"
        case Connector.VLLM_PULL | Connector.NONE:
            return "kv_both"
        case _:
            assert_never(spec.connector)


def _engine_env(spec: ClusterSpec, engine: Engine, share: Share) -> Mapping[str, str]:
    ours = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": engine.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(engine.kv_port or engine.port + 1),
        "VLLM_CPU_OMP_THREADS_BIND": share.cores,
        **({"CUDA_VISIBLE_DEVICES": share.gpus} if share.gpus else {}),
        **spec.device.env,
    }
    unset = {name: value for name, value in ours.items() if name not in os.environ or name.startswith("VLLM_NIXL")}
    return {**unset, **spec.env}


def router_command(spec: ClusterSpec, engines: Sequence[Engine], port: int) -> Command:
    """How the router in front of `engines` is started."""
    argv = [
        *(sys.executable, "-m", "kvpush.cli", "router"),
        *("--host", spec.host, "--port", str(port)),
        *("--connector", spec.connector),
        *("--conversations", spec.conversations),
    ]
    for engine in engines:
        argv += [f"--{engine.role}", _router_engine(engine)]
    return Command((*argv, *spec.router_args), {})


def _router_engine(engine: Engine) -> str:
    if not engine.kv_port:
        return engine.url
    return f"{engine.url},kv={engine.host}:{engine.kv_port},engine_id={engine.name}"


def share_machine(cores: Sequence[int], gpus: Sequence[int], engines: int) -> list[Share]:
    """Which cores and GPUs each engine gets: equal shares, or in turn when there are fewer than engines."""
    core_lists = _split(cores, engines)
    gpu_lists = _split(gpus, engines) if gpus else [""] * engines
    return [Share(*both) for both in zip(core_lists, gpu_lists, strict=True)]


def _split(items: Sequence[int], engines: int) -> list[str]:
    if len(items) < engines:
        return [str(items[i % len(items)]) for i in range(engines)]
    size = len(items) // engines
    return [",".join(map(str, items[i * size : (i + 1) * size])) for i in range(engines)]
