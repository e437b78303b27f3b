"""What each connector needs in the two legs' `kv_transfer_params`.

For vLLM's own connectors the field names are those of vLLM 0.32's `nixl` connectors. NixlPushConnector
matches the legs by their request ids, so both legs carry the same `X-Request-Id`; kvpush does not need
that, but gets it too, because it makes sub-requests of one body comparable and logs easy to join.
"""

from typing import Any

import msgspec

from kvpush.core.ids import Key
from kvpush.core.params import Reference, receive_params, reused_tokens, send_params
from kvpush.router.asked import Asked, Local
from kvpush.router.config import Connector
from kvpush.router.engine import Identity


def is_concurrent(connector: Connector) -> bool:
    """Whether the decode leg may start before the prefill leg has answered."""
    return connector in (Connector.KVPUSH, Connector.VLLM_PUSH)


def needs_identity(connector: Connector) -> bool:
    """Whether the decode leg must name the prefill engine's control address."""
    return connector in (Connector.KVPUSH, Connector.VLLM_PUSH)


def local_reason(connector: Connector, asked: Asked) -> Local | None:
    """Why this connector cannot split this request over two engines; None when it can."""
    if connector is Connector.NONE:
        return Local.NO_CONNECTOR
    if connector is Connector.VLLM_PULL and asked.sub_requests > 1:
        return Local.MANY_PROMPTS
    return asked.must_be_local


def prefill_params(connector: Connector, key: Key, reuse: Reference | None = None) -> dict[str, Any]:
    """The prefill leg's `kv_transfer_params`; `reuse` is where an earlier turn is kept."""
    if connector is Connector.KVPUSH:
        return send_params(key, reuse)
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def decode_params(connector: Connector, key: Key, identity: Identity, keep: Key | None = None) -> dict[str, Any]:
    """The decode leg's `kv_transfer_params` for a connector whose legs start together; `keep` is under which key this
    turn is to be kept."""
    params = receive_params(key, identity.target, identity.tp_size, keep)
    if connector is Connector.VLLM_PUSH:
        params["pp_size"] = 1
        params["remote_request_id"] = None
        del params["attempt"]
    return params


def tokens_not_computed(connector: Connector, answer: msgspec.Raw | None) -> int:
    """How many prompt tokens an earlier turn has saved the prefill engine, by its answer's `kv_transfer_params`."""
    return reused_tokens(answer) if connector is Connector.KVPUSH and answer is not None else 0


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def read_prefill_answer(body: bytes) -> msgspec.Raw | None:
    """The `kv_transfer_params` of a prefill leg's answer, None without them.

    Raises `msgspec.DecodeError` when the answer is no JSON object.
    """
    params = msgspec.json.decode(body, type=_PrefillAnswer).kv_transfer_params.copy()
    return None if bytes(params) == b"null" else params
