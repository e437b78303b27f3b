"""`kv_transfer_params`: what the router writes into a request's body and the adapter reads.

The field names are those that routers already send for vLLM's NixlPushConnector.
"""

from typing import Any

import msgspec

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address, EngineId, Key, Target, TransferId
from kvpush.core.mode import Mode, ModeSetting


class Reference(msgspec.Struct, frozen=True):
    """An earlier turn of a conversation: who keeps it, and under which key."""

    key: Key
    target: Target


class SendParams(msgspec.Struct, frozen=True):
    """The prefill leg: keep the prompt's KV for the receiver that asks with `key`. What `reuse` refers to need not be
    computed, as far as it is the same."""

    key: Key
    reuse: Reference | None = None


class ReceiveParams(msgspec.Struct, frozen=True):
    """The decode leg: get the prompt's KV from `target`, in `mode` or (None) in what the pair has chosen. When it has
    finished, `keep` prompt and answer under that key for the next turn."""

    key: Key
    target: Target
    tp_size: int
    keep: Key | None = None
    mode: Mode | None = None


def send_params(key: Key, reuse: Reference | None = None) -> dict[str, Any]:
    """The prefill leg's `kv_transfer_params`."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, **_of_key(key)}
    return params if reuse is None else {**params, "reuse": {**_of_key(reuse.key), **_of_target(reuse.target)}}


class _Reused(msgspec.Struct):
    reused_tokens: int = 0


def reused_tokens(answer: bytes | msgspec.Raw) -> int:
    """How many tokens of an earlier turn a prefill engine has received, by the JSON of its answer's
    `kv_transfer_params`; 0 when it does not say."""
    try:
        return msgspec.json.decode(answer, type=_Reused).reused_tokens
    except msgspec.DecodeError:
        return 0


def receive_params(
    key: Key, target: Target, tp_size: int = 1, keep: Key | None = None, mode: Mode | None = None
) -> dict[str, Any]:
    """The decode leg's `kv_transfer_params`."""
    where = {**_of_key(key), **_of_target(target), "tp_size": tp_size}
    params = {"do_remote_decode": False, "do_remote_prefill": True, **where}
    wishes = {"keep": keep and _of_key(keep), "mode": mode and str(mode)}
    return {**params, **{name: wish for name, wish in wishes.items() if wish is not None}}


def _of_key(key: Key) -> dict[str, Any]:
    return {"transfer_id": key.transfer_id, "attempt": key.attempt}


def _of_target(target: Target) -> dict[str, Any]:
    address = target.address
    return {"remote_host": address.host, "remote_port": address.port, "remote_engine_id": target.engine_id}


class _Place(msgspec.Struct):
    """A key, and an address that belongs to it."""

    transfer_id: str = ""
    attempt: int = 0
    remote_host: str = ""
    remote_port: int = 0
    remote_engine_id: str | None = None


class _Wire(_Place):
    """The fields we read; others (of other connectors) are ignored."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    tp_size: int = 1
    mode: ModeSetting = ModeSetting.AUTO
    keep: _Place | None = None
    reuse: _Place | None = None


def parse(params: object) -> SendParams | ReceiveParams | None:
    """Read a request's `kv_transfer_params`; None when it asks for no transfer.

    Raises `ConfigError` naming the field that is missing or wrong.
    """
    if not params:
        return None
    try:
        wire = msgspec.convert(params, _Wire)
    except msgspec.ValidationError as error:
        raise ConfigError("kv_transfer_params", str(error), "Let the router write this field.") from None
    if not (wire.do_remote_prefill or wire.do_remote_decode):
        return None
    key = _key(wire, "")
    if wire.do_remote_decode:
        reuse = Reference(_key(wire.reuse, "reuse."), _target(wire.reuse, "reuse.")) if wire.reuse else None
        return SendParams(key, reuse)
    keep = _key(wire.keep, "keep.") if wire.keep else None
    mode = None if wire.mode is ModeSetting.AUTO else Mode(wire.mode.value)
    return ReceiveParams(key, _target(wire, ""), wire.tp_size, keep, mode)


def _key(place: _Place, where: str) -> Key:
    name = f"kv_transfer_params.{where}"
    if not place.transfer_id:
        raise ConfigError(f"{name}transfer_id", "is missing", "Send a fresh random id with both legs.")
    if not 0 <= place.attempt < 2**31:
        raise ConfigError(f"{name}attempt", f"{place.attempt} is out of range", "Count from 0.")
    return Key(TransferId(place.transfer_id), place.attempt)


def _target(place: _Place, where: str) -> Target:
    host, port = place.remote_host, place.remote_port
    if not host or not 0 < port < 65536:
        raise ConfigError(
            f"kv_transfer_params.{where}remote_host/remote_port",
            f"'{host}:{port}' is no address",
            "Name the kvpush control address of the engine that sends.",
        )
    return Target(Address(host, port), EngineId(place.remote_engine_id) if place.remote_engine_id else None)
