"""Who is compared: names as on the command line, and the cluster that each stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvpush.cli.cluster import Cluster
from kvpush.cli.parts import FIRST_TOKEN_ARGS, FORWARD_ARGS, ClusterSpec
from kvpush.cli.up import make_spec
from kvpush.core.errors import ConfigError
from kvpush.core.mode import ModeSetting
from kvpush.router.config import Connector
from kvpush.sim.settings import SimSettings


class Contender(StrEnum):
    """One engine, or one prefill and one decode engine with a connector between them."""

    SINGLE = "single"
    KVPUSH_PUSH = "kvpush:push"
    KVPUSH_FIRST = "kvpush:first"
    KVPUSH_PULL = "kvpush:pull"
    VLLM_PUSH = "vllm:push"
    VLLM_PULL = "vllm:pull"


REFERENCE = Contender.KVPUSH_PUSH
"""Ratios are to this one."""

_CONNECT_TIMEOUT_S = 30.0
"""A machine that is busy with the measurement itself must not make the router give an engine up."""

_CONNECTORS: Mapping[Contender, Connector] = {
    Contender.SINGLE: Connector.NONE,
    Contender.KVPUSH_PUSH: Connector.KVPUSH,
    Contender.KVPUSH_FIRST: Connector.KVPUSH,
    Contender.KVPUSH_PULL: Connector.KVPUSH,
    Contender.VLLM_PUSH: Connector.VLLM_PUSH,
    Contender.VLLM_PULL: Connector.VLLM_PULL,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all contenders have in common. `kv_gib`: KV cache of each engine. `kvpush`: settings of its connector."""

    device: str
    logs: Path
    kv_gib: float = 1.0
    verify: bool = False
    vllm_args: tuple[str, ...] = ()
    kvpush: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        """KV cache of each engine."""
        return int(self.kv_gib * 2**30)

    @property
    def profile(self) -> str | None:
        """The simulated device's profile; None when the device is real."""
        kind, _, name = self.device.partition(":")
        return name if kind == "sim" else None


def parse_contenders(text: str) -> list[Contender]:
    """Read a comma-separated list. Raises `ConfigError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [contender.value for contender in Contender]
    for name in names:
        if name not in known:
            raise ConfigError("connectors", f"'{name}' is not known", f"Use some of {', '.join(known)}.")
    if not names or len(set(names)) < len(names):
        raise ConfigError("connectors", f"'{text}' is empty or names one twice", "Name each once.")
    return [Contender(name) for name in names]


def log_folder(setting: Setting, contender: Contender, round_number: int) -> Path:
    """Where a contender's processes of one round log."""
    return setting.logs / f"{contender.value.replace(':', '-')}-{round_number}"


def make_cluster(setting: Setting, contender: Contender, round_number: int) -> Cluster:
    """Plan a contender's cluster; entering it starts it. Its processes log into a new folder."""
    logs = log_folder(setting, contender, round_number)
    logs.mkdir(parents=True, exist_ok=True)
    base = make_spec(
        "tiny",
        connector=_CONNECTORS[contender],
        mode=ModeSetting.PULL if contender is Contender.KVPUSH_PULL else ModeSetting.PUSH,
        device=setting.device,
        log_dir=logs,
        vllm_args=("--kv-cache-memory-bytes", str(setting.kv_bytes), *setting.vllm_args),
    )
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    fields["router_args"] = ("--connect-timeout-s", str(_CONNECT_TIMEOUT_S))
    fields["env"] = {**base.env, **_env(setting, logs)}
    if _CONNECTORS[contender] is Connector.KVPUSH:
        fields["connector_config"] = {**base.connector_config, **setting.kvpush}
    if contender is Contender.KVPUSH_FIRST:
        fields["decode_args"] = (*base.decode_args, *FIRST_TOKEN_ARGS)
        fields["router_args"] = (*fields["router_args"], *FORWARD_ARGS)
    return Cluster(ClusterSpec(**fields))


def _env(setting: Setting, logs: Path) -> dict[str, str]:
    env = {"KVPUSH_RECORDS": str(logs), "KVPUSH_HOOK_TIMES": str(logs)}
    if setting.profile is not None:
        env |= SimSettings(profile=setting.profile, verify=setting.verify, log=str(logs)).to_env()
    return env
