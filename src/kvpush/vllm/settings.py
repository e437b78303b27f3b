"""What a user may set in `kv_connector_extra_config`, read once into a frozen value.

    {"host": "10.0.0.7", "port": 5600, "secret_file": "/run/secrets/kvpush", "lease_s": 60}

All of `ProtocolConfig`'s fields are accepted beside those of `Settings`, and `secret_file` in the place of `secret`. An
unknown key or a bad value stops the engine's start with an error that names it.
"""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address
from kvpush.core.mode import ModeSetting
from kvpush.runtime.auth import read_secret

FIELD = "kv_connector_extra_config"
DEFAULT_PORT = 5600
"""That of vLLM's NIXL connectors, so that routers made for them find kvpush where they expect it."""

_SECRET_FILE = "secret_file"
_HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
_PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_T = TypeVar("_T")
_NO_DESTINATIONS = ("", "0.0.0.0", "::", "*")


class Push(StrEnum):
    """When a prompt is handed to the transfer thread."""

    WHOLE = "whole"  # when its request has finished
    PROGRESSIVE = "progressive"  # chunk by chunk, each when its forward pass is done
    LAYERWISE = "layerwise"  # and within a forward pass a few layers at a time, where that pays


_REMEDIES = {name: f"Use one of {', '.join(choices)}." for name, choices in (("mode", ModeSetting), ("push", Push))}


class Keeping(NamedTuple):
    """How much of the pool finished requests may hold for the next turn of their conversations, and for how long."""

    share: float
    seconds: float


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's settings.

    `host` is both listened on and told to peers. `port` is that of the engine's first rank; rank `r` of data
    parallel rank `d` listens on `port + d * ranks + r`; 0 picks free ones, which only the engine's own
    answers can tell. `switch_us`: see `ThreadConfig`.
    `mode`: who moves the bytes; `push`: when prompts are handed over (with pull, one is offered when it is complete).
    `keep_share` of the KV pool may hold finished conversations for `keep_s`; see docs/conversations.md.
    `reserve_early`: the part of a decode engine's KV pool that must stay free when blocks are set aside for a prompt
    whose prefill has not begun; 0 sets them aside in any case, 1 never.
    `model` replaces the fingerprint by which engines decide whether they serve the same.
    """

    host: str
    port: int
    secret: str = ""
    backends: tuple[str, ...] = ("UCX",)
    poll_us: int = 100
    switch_us: int = 500
    mode: ModeSetting = ModeSetting.PUSH
    push: Push = Push.LAYERWISE
    keep_share: float = 0.3
    keep_s: float = 300.0
    reserve_early: float = 0.5
    model: str = ""
    protocol: ProtocolConfig = ProtocolConfig()

    def __post_init__(self) -> None:
        if self.host in _NO_DESTINATIONS:
            raise ConfigError(f"{FIELD}.host", f"'{self.host}' is no address that a peer could reach", "Name one.")
        _require(0 <= self.port < 65536, "port", self.port, "Use 1 to 65535, or 0 to pick a free one.")
        _require(bool(self.backends), "backends", self.backends, "Name at least one NIXL backend, such as UCX.")
        _require(self.poll_us > 0, "poll_us", self.poll_us, "Set a positive number of microseconds.")
        _require(0 <= self.keep_share <= 1, "keep_share", self.keep_share, "Use 0 (keep nothing) to 1.")
        _require(0 < self.keep_s < float("inf"), "keep_s", self.keep_s, "Set a positive number of seconds.")
        _require(0 <= self.reserve_early <= 1, "reserve_early", self.reserve_early, "Use a share from 0 to 1.")
        _require(0 <= self.switch_us <= 1_000_000, "switch_us", self.switch_us, "Use 0 (as it is) to 1000000.")

    @property
    def keeping(self) -> Keeping:
        """What is kept of finished requests."""
        return Keeping(self.keep_share, self.keep_s)

    def address(self, group: int, rank: int, ranks: int) -> Address:
        """Where rank `rank` of the `ranks` of data parallel rank `group` listens."""
        port = self.port + group * ranks + rank if self.port else 0
        if port >= 65536:
            raise ConfigError(f"{FIELD}.port", f"{self.port} leaves no port for rank {rank}", "Use a lower one.")
        return Address(self.host, port)


def read_settings(extra_config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the connector's part of vLLM's configuration. Raises `ConfigError` naming what is wrong."""
    protocol_fields = ProtocolConfig.__struct_fields__
    given = {key: value for key, value in extra_config.items() if key not in protocol_fields}
    _refuse_unknown(given)
    if _SECRET_FILE in given:
        given["secret"] = _secret_from_file(given, given.pop(_SECRET_FILE))
    given.setdefault("host", environ.get(_HOST_VARIABLE, "127.0.0.1"))
    if "port" not in given:
        given["port"] = _port(environ.get(_PORT_VARIABLE, str(DEFAULT_PORT)))
    timing = {key: value for key, value in extra_config.items() if key in protocol_fields}
    return _convert({**given, "protocol": _convert(timing, ProtocolConfig)}, Settings)


def _secret_from_file(given: Mapping[str, Any], path: object) -> str:
    if "secret" in given:
        raise ConfigError(f"{FIELD}.{_SECRET_FILE}", "is given beside 'secret'", "Give one of the two.")
    if not isinstance(path, str):
        raise ConfigError(f"{FIELD}.{_SECRET_FILE}", f"{path} is no path", "Name a file.")
    return read_secret(path)


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = sorted({*Settings.__struct_fields__, *ProtocolConfig.__struct_fields__, _SECRET_FILE} - {"protocol"})
    for key in given:
        if key not in known:
            raise ConfigError(f"{FIELD}.{key}", "is no setting of kvpush", f"Known are: {', '.join(known)}.")


def _port(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(_PORT_VARIABLE, f"'{text}' is no port number", "Use 1 to 65535, or 0 to pick a free one.")
    return int(text)


def _convert(given: Mapping[str, Any], into: type[_T]) -> _T:
    try:
        return msgspec.convert(given, into)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        name = re.sub(r"^`\$\.?|`$", "", path)
        raise ConfigError(f"{FIELD}.{name}" if name else FIELD, problem, _REMEDIES.get(name, "Correct it.")) from None


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise ConfigError(f"{FIELD}.{name}", f"{value} is out of range", remedy)
