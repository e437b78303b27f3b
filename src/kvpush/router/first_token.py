"""The first token, sent to the client when the prefill engine has sampled it: for which requests, and what is sent.

The decode engine begins with the same token (see vllm/first_token.py), but only when the prompt's KV has come. What the
client has been sent early is later checked against what the decode engine says (overlap.py); so a request whose
answer might begin otherwise there must not be begun here. A field that is not known to be harmless is an obstacle.
"""

from enum import StrEnum

import msgspec

from kvpush.router.body import Fields, read
from kvpush.router.events import Chunk, Events, read_chunk


class Fate(StrEnum):
    """What became of a first token: the `outcome` label of a counter. Every streamed request that takes two engines
    has one."""

    FORWARDED = "forwarded"  # sent early, and the decode engine has begun with it
    CONTRADICTED = "contradicted"  # sent early, and the decode engine has begun otherwise: the answer was broken off
    UNCONFIRMED = "unconfirmed"  # sent early, and the answer ended before the decode engine had said it
    # sent by the decode engine, as ever, because ...
    EXCLUDED = "excluded"  # the request asks for what makes the beginning uncertain
    NO_TEXT = "no_text"  # it is the last token, or no whole text
    UNSUPPORTED = "unsupported"  # the decode engine does not say that it begins with it, or is not chosen yet
    DISTRUSTED = "distrusted"  # the decode engine has contradicted several times of late
    LATE = "late"  # the decode engine was as fast
    UNDECIDED = "undecided"  # the request ended before there was a first token


_HARMLESS = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "stream",
        "user",
        "metadata",
        "request_id",
        "session_id",
        "priority",
        "cache_salt",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "truncate_prompt_tokens",
        "truncation_side",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",  # looks at prompt and answer alike
        "length_penalty",  # of beams only
        "logit_bias",
        "allowed_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",  # without a stop string
    }
)
_HARMLESS_VALUES = {
    "n": (b"1",),
    "best_of": (b"1",),
    "seed": (),  # the generator's state is on the other engine; 0 is a seed
    "logprobs": (b"false",),  # 0 asks for those of the tokens themselves
    "top_logprobs": (b"0",),
    "include_reasoning": (b"true",),
    "parallel_tool_calls": (b"true", b"false"),
    "presence_penalty": (b"0", b"0.0"),
    "frequency_penalty": (b"0", b"0.0"),
    "min_tokens": (b"0",),
}
_NOTHING = (b"false", b"[]", b"{}", b'""')
_UNFINISHED = "\ufffd"


def is_certain(fields: Fields) -> bool:
    """Whether the decode engine will begin with the prefill engine's first token, unless something fails."""
    return all(_is_harmless(name, bytes(raw), fields) for name, raw in fields.items())


def _is_harmless(name: str, value: bytes, fields: Fields) -> bool:
    if name in _HARMLESS or value == b"null":
        return True
    if name in ("max_tokens", "max_completion_tokens"):
        return (read(fields, name, int, 0) or 0) > 1
    if name == "stream_options":
        return not (read(fields, name, _StreamOptions, None) or _CONTINUOUS).continuous_usage_stats
    return value in _HARMLESS_VALUES.get(name, _NOTHING)


class _StreamOptions(msgspec.Struct):
    continuous_usage_stats: bool | None = False


_CONTINUOUS = _StreamOptions(continuous_usage_stats=True)


class FirstToken(msgspec.Struct, frozen=True):
    """What the client is sent early: whole events, and the text in them."""

    events: bytes
    text: str


class FirstTokenReader:
    """Reads a prefill leg's stream as far as its first token. `first_token` is None when that cannot be sent early."""

    def __init__(self) -> None:
        self.first_token: FirstToken | None = None
        self._events = Events()
        self._opening = b""

    def feed(self, data: bytes) -> bool:
        """More of the stream. Returns whether the first token is here, or none will come."""
        self._events.feed(data)
        while (event := self._events.take()) is not None:
            chunk = read_chunk(event)
            if chunk is None or not _says_who_speaks(chunk):
                self.first_token = _first_token(self._opening, chunk) if chunk is not None else None
                return True
            self._opening += event
        return False


def _says_who_speaks(chunk: Chunk) -> bool:
    return not chunk.text and chunk.finish_reason is None and not chunk.extras


def _first_token(opening: bytes, chunk: Chunk) -> FirstToken | None:
    """None for the end of an answer, part of a character, and what is not text only."""
    is_whole = chunk.finish_reason == "length" and _UNFINISHED not in chunk.text
    if not is_whole or chunk.extras or chunk.has_usage or not _is_plain(chunk):
        return None
    return FirstToken(opening + chunk.going_on(), chunk.text)


def _is_plain(chunk: Chunk) -> bool:
    """A chat's text may be the beginning of a marker, which the engine's parsers hold back while more can follow."""
    return bool(chunk.text) if chunk.delta is None else chunk.text.lstrip()[:1].isalnum()
