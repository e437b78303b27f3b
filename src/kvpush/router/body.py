"""Request bodies: parsed as far as routing needs, every other value kept as the bytes the client sent.

`kv_transfer_params` belongs to the router: whatever a client puts there is removed from every body that
reaches an engine, because it names hosts to connect to and blocks to read.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from kvpush.router.answers import RequestRefused, error_answer

Fields = dict[str, msgspec.Raw]
"""A JSON object whose values are still the bytes the client sent."""

OWNED = "kv_transfer_params"
_EXTRA = "vllm_xargs"

_decoder = msgspec.json.Decoder(Fields)
_encoder = msgspec.json.Encoder()


class Route(StrEnum):
    """The routes that are served by two engines."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


def parse_fields(body: bytes) -> Fields:
    """Read a JSON object. Raises `RequestRefused` (400)."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        answer = error_answer(400, f"The body is not a JSON object: {error}", "invalid_request_error")
        raise RequestRefused(answer) from None


def strip_owned(fields: Fields) -> Fields:
    """The same body without anything that a client may not set."""
    kept = {name: raw for name, raw in fields.items() if name != OWNED}
    extra = read(fields, _EXTRA, dict[str, msgspec.Raw], None)
    if extra is not None and OWNED in extra:
        del extra[OWNED]
        kept[_EXTRA] = msgspec.Raw(_encoder.encode(extra))
    return kept


def with_params(fields: Fields, params: Mapping[str, Any] | msgspec.Raw) -> bytes:
    """The body of a leg, with the router's own `kv_transfer_params`."""
    return _encoder.encode({**fields, OWNED: params})


def encode(fields: Mapping[str, Any]) -> bytes:
    """The body of a leg that moves no KV."""
    return _encoder.encode(fields)


T = TypeVar("T")


def read(fields: Fields, name: str, kind: type[T], default: T | None) -> T | None:
    """One value, or `default` when it is missing or of another type: judging it is the engine's job."""
    raw = fields.get(name)
    if raw is None:
        return default
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError:
        return default
