"""Chunks of streamed answers, read where the router has to: those around the first token, and no others."""

from typing import Final

import msgspec

from kvpush.router.body import Fields, encode

EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "
_NULL: Final = msgspec.Raw(b"null")
_ABSENT: Final = frozenset({b"null", b"[]"})

_fields = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])
_text = msgspec.json.Decoder(str | None)


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event with exactly one choice, of either route. `delta` is None for plain completions.

    `finish_reason` is None while the answer goes on. Texts are those of the model, "" for none.
    """

    fields: Fields
    choice: Fields
    delta: Fields | None
    text: str
    finish_reason: str | None

    @property
    def extras(self) -> list[str]:
        """What a chat's message has beside its role and text: reasoning, tool calls."""
        shown = ("role", "content")
        return [name for name, raw in (self.delta or {}).items() if name not in shown and bytes(raw) not in _ABSENT]

    @property
    def has_usage(self) -> bool:
        """Whether the engine counts tokens in each chunk."""
        return bytes(self.fields.get("usage", _NULL)) != b"null"

    def with_text(self, text: str) -> bytes:
        """The same event with another text."""
        return self._event(self.fields, self.choice, text)

    def going_on(self) -> bytes:
        """The same event as the engine would have sent it had the answer not ended there."""
        fields = {name: raw for name, raw in self.fields.items() if name != "system_fingerprint"}
        choice = {**self.choice, "finish_reason": _NULL}
        if self.delta is not None:
            choice.pop("stop_reason", None)
        return self._event(fields, choice, self.text)

    def _event(self, fields: Fields, choice: Fields, text: str) -> bytes:
        shown = {"text": text} if self.delta is None else {"delta": {**self.delta, "content": text}}
        return _DATA + encode({**fields, "choices": [{**choice, **shown}]}) + EVENT_END


def read_chunk(event: bytes) -> Chunk | None:
    """Read one event with its end. None for whatever has not exactly one choice: usage, errors, the last event."""
    try:
        fields = _fields.decode(event.removeprefix(_DATA))
        choices = _choices.decode(fields.get("choices", b"[]"))
        return _one_choice(fields, *choices) if len(choices) == 1 else None
    except msgspec.DecodeError:
        return None


def _one_choice(fields: Fields, choice: Fields) -> Chunk:
    delta = _fields.decode(choice["delta"]) if "delta" in choice else None
    text = choice.get("text", _NULL) if delta is None else delta.get("content", _NULL)
    return Chunk(
        fields=fields,
        choice=choice,
        delta=delta,
        text=_text.decode(text) or "",
        finish_reason=_text.decode(choice.get("finish_reason", _NULL)),
    )


class Events:
    """Cuts a stream of bytes into whole events."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> None:
        """More bytes have come."""
        self.rest += data

    def take(self) -> bytes | None:
        """The next whole event with its end; None when it is not here yet."""
        end = self.rest.find(EVENT_END)
        if end < 0:
            return None
        end += len(EVENT_END)
        event, self.rest = self.rest[:end], self.rest[end:]
        return event
