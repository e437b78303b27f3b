"""`kv_transfer_params`: what the router writes into a request's body and the adapter reads.

The field names are those that routers already send for vLLM's NixlPushConnector.
"""

from typing import Any

import msgspec

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address, EngineId, Key, Target, TransferId
from kvpush.core.mode import Mode, ModeSetting


class SendParams(msgspec.Struct, frozen=True):
    """The prefill leg: keep the prompt's KV for the receiver that asks with `key`."""

    key: Key


class ReceiveParams(msgspec.Struct, frozen=True):
    """The decode leg: get the prompt's KV from `target`, in this mode or (None) in what the pair has chosen."""

    key: Key
    target: Target
    tp_size: int
    mode: Mode | None = None


def send_params(key: Key) -> dict[str, Any]:
    """The prefill leg's `kv_transfer_params`."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": key.transfer_id,
        "attempt": key.attempt,
    }


def receive_params(key: Key, target: Target, tp_size: int = 1, mode: Mode | None = None) -> dict[str, Any]:
    """The decode leg's `kv_transfer_params`."""
    return {
        **({} if mode is None else {"mode": str(mode)}),
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": key.transfer_id,
        "attempt": key.attempt,
        "remote_host": target.address.host,
        "remote_port": target.address.port,
        "remote_engine_id": target.engine_id,
        "tp_size": tp_size,
    }


class _Wire(msgspec.Struct):
    """The fields we read; others (of other connectors) are ignored."""

    transfer_id: str = ""
    attempt: int = 0
    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_host: str = ""
    remote_port: int = 0
    remote_engine_id: str | None = None
    tp_size: int = 1
    mode: ModeSetting = ModeSetting.AUTO


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
    if not wire.transfer_id:
        raise ConfigError("kv_transfer_params.transfer_id", "is missing", "Send a fresh random id with both legs.")
    if not 0 <= wire.attempt < 2**31:
        raise ConfigError("kv_transfer_params.attempt", f"{wire.attempt} is out of range", "Count from 0.")
    key = Key(TransferId(wire.transfer_id), wire.attempt)
    if wire.do_remote_decode:
        return SendParams(key)
    if not wire.remote_host or not 0 < wire.remote_port < 65536:
        raise ConfigError(
            "kv_transfer_params.remote_host/remote_port",
            f"'{wire.remote_host}:{wire.remote_port}' is no address",
            "Name the prefill engine's kvpush control address.",
        )
    engine_id = EngineId(wire.remote_engine_id) if wire.remote_engine_id else None
    mode = None if wire.mode is ModeSetting.AUTO else Mode(wire.mode.value)
    return ReceiveParams(key, Target(Address(wire.remote_host, wire.remote_port), engine_id), wire.tp_size, mode)
