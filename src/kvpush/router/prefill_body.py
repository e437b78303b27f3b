"""The prefill leg's body: the same prompt, one token, nothing that shapes an answer nobody reads.

Both engines must render the same prompt tokens, so every field that a chat template or tokenizer can see
(messages, prompt, tools, tool_choice, chat_template_kwargs, truncation, ...) stays byte for byte. Fields
are removed only when they say how the answer is made or shown.

`n` and lists of prompts stay too: the engine makes the same sub-requests, in the same order, on both legs.
"""

import msgspec

from kvpush.router.body import Fields, Route

_DROPPED = frozenset(
    {
        "stream_options",  # a 400 without stream
        "stream_interval",
        "min_tokens",  # more than max_tokens is a 400
        "max_completion_tokens",  # set again below where the route knows it
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "echo",
        "suffix",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_token_offsets",
        "response_format",  # a grammar is compiled before the prompt may run
        "structured_outputs",
    }
)
_FALSE = msgspec.Raw(b"false")
_TRUE = msgspec.Raw(b"true")
_ONE = msgspec.Raw(b"1")


def prefill_fields(route: Route, fields: Fields) -> Fields:
    """The body of the prefill leg, without `kv_transfer_params`."""
    kept = {name: raw for name, raw in fields.items() if name not in _DROPPED}
    kept["stream"] = _FALSE
    kept["max_tokens"] = _ONE
    if route is Route.CHAT:
        kept["max_completion_tokens"] = _ONE
    return kept


def streamed(fields: Fields) -> Fields:
    """The same body for an answer in events, made as those of the decode leg."""
    return {**fields, "stream": _TRUE}
