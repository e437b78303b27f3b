"""Asking an OpenAI-compatible server one question, with the time of every piece of the answer."""

import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from kvpush.core.errors import KVPushError

TIMEOUT_S = 120.0


class AskError(KVPushError):
    """The server did not answer the question; says what it answered instead."""


@dataclass(frozen=True)
class Answer:
    """One answer. Times are the monotonic clock, in seconds; `headers` have lower-case names."""

    text: str
    headers: dict[str, str]
    asked_at: float
    first_at: float
    ended_at: float
    prompt_tokens: int
    completion_tokens: int


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def ask(url: str, body: dict[str, object], on_text: Callable[[str], object] = lambda _: None) -> Answer:
    """Send a chat completion to the base `url` as a stream; `on_text` hears each piece as it comes.

    Raises `AskError`.
    """
    asked_at = time.monotonic()
    text, first_at, usage = "", 0.0, _Usage()
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
        response = _post(connection, body)
        for chunk in _chunks(response):
            piece = "".join(choice.delta.content or "" for choice in chunk.choices)
            if piece:
                first_at = first_at or time.monotonic()
                on_text(piece)
            text += piece
            usage = chunk.usage or usage
    headers = {name.lower(): value for name, value in response.getheaders()}
    ended_at = time.monotonic()
    return Answer(text, headers, asked_at, first_at, ended_at, usage.prompt_tokens, usage.completion_tokens)


def _post(connection: http.client.HTTPConnection, body: dict[str, object]) -> http.client.HTTPResponse:
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        connection.request(
            "POST", "/v1/chat/completions", msgspec.json.encode(streamed), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise AskError(f"status {response.status}: {response.read(1000).decode(errors='replace')}")
    except (OSError, http.client.HTTPException) as error:
        raise AskError(f"{connection.host}:{connection.port} does not answer: {error!r}") from None
    return response


def _chunks(response: http.client.HTTPResponse) -> Iterator[_Chunk]:
    """The chunks of a stream. Raises `AskError` when it ends without its end mark."""
    try:
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if line.startswith(b"data: "):
                yield msgspec.json.decode(data, type=_Chunk)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise AskError(f"the answer broke off: {error!r}") from None
    raise AskError("the answer ended without its end mark")
