"""What one client request asks for, as far as routing cares."""

from enum import StrEnum

import msgspec

from kvpush.router.body import Fields, Route, parse_fields, read, strip_owned
from kvpush.router.prefixes import prefix_hashes

SHAPES_PROMPT = ("model", "tools", "cache_salt", "chat_template", "chat_template_kwargs")
"""Fields that change the tokens in front of the messages."""


class Local(StrEnum):
    """Why a request gets no prefill leg: the `reason` label of the counter of local requests."""

    NO_CONNECTOR = "no_connector"
    SHORT = "short_prompt"
    PROMPT_LOGPROBS = "prompt_logprobs"  # D computes the whole prompt itself to have its logits
    BEAM_SEARCH = "beam_search"  # its inner requests carry no transfer parameters
    TRUNCATION = "truncation"  # -1 may cut P's and D's prompts at different places
    MANY_PROMPTS = "many_prompts"  # vllm-pull hands over one prompt per answer


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request for tokens. `tokens` is an estimate of its prompt's length, all prompts together.

    `prefix` has one hash per block of the prompt's raw JSON (see prefixes.py).
    """

    route: Route
    fields: Fields
    stream: bool
    sub_requests: int
    tokens: int
    prefix: tuple[int, ...]
    must_be_local: Local | None


def parse_asked(route: Route, body: bytes, bytes_per_token: float = 4.0) -> Asked:
    """Read a request's body. Raises `RequestRefused` (400)."""
    fields = strip_owned(parse_fields(body))
    text = bytes(fields.get("prompt" if route is Route.COMPLETIONS else "messages", b""))
    prompts = count_prompts(text) if route is Route.COMPLETIONS else 1
    return Asked(
        route=route,
        fields=fields,
        stream=bool(read(fields, "stream", bool, False)),
        sub_requests=prompts * max(read(fields, "n", int, 1) or 1, 1),
        tokens=estimate_tokens(text, bytes_per_token),
        prefix=prefix_hashes(text, tuple(bytes(fields.get(name, b"")) for name in SHAPES_PROMPT)),
        must_be_local=_local_reason(fields),
    )


def count_prompts(prompt: bytes) -> int:
    """How many prompts the raw JSON of a `prompt` field holds."""
    if not prompt.startswith(b"["):
        return 1
    try:
        items = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    except msgspec.DecodeError:
        return 1
    return len(items) if items and bytes(items[0])[:1] in (b'"', b"[") else 1


def estimate_tokens(text: bytes, bytes_per_token: float) -> int:
    """Tokens in the raw JSON of a prompt: exact for token ids, `bytes_per_token` for text."""
    if text.startswith(b"[") and b'"' not in text:
        return text.count(b",") + 1 if len(text) > 2 else 0
    return round(len(text) / bytes_per_token)


def _local_reason(fields: Fields) -> Local | None:
    asks_prompt_logprobs = read(fields, "prompt_logprobs", int, None) is not None
    echoes_logprobs = bool(read(fields, "echo", bool, False)) and read(fields, "logprobs", int, None) is not None
    if asks_prompt_logprobs or echoes_logprobs:
        return Local.PROMPT_LOGPROBS
    if read(fields, "use_beam_search", bool, False):
        return Local.BEAM_SEARCH
    if (read(fields, "truncate_prompt_tokens", int, None) or 0) < 0:
        return Local.TRUNCATION
    return None


OTHER = Asked(route=Route.COMPLETIONS, fields={}, stream=False, sub_requests=1, tokens=0, prefix=(), must_be_local=None)
"""Stands for a request whose body the router does not read."""
