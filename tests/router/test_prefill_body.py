"""The prefill leg's body, parameter by parameter (case B49)."""

import json
from typing import Any

import pytest

from kvpush.router.body import Route, encode, parse_fields
from kvpush.router.prefill_body import prefill_fields

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "hi"}]

# what the client sends besides the prompt -> what must be left of it
TABLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("nothing", {}, {}),
    ("stream", {"stream": True}, {}),
    ("no stream", {"stream": False}, {}),
    ("stream_options", {"stream": True, "stream_options": {"include_usage": True}}, {}),
    ("stream_options without stream", {"stream_options": {"include_usage": True}}, {}),
    ("stream_interval", {"stream": True, "stream_interval": 4}, {}),
    ("max_tokens", {"max_tokens": 500}, {}),
    ("max_tokens null", {"max_tokens": None}, {}),
    ("max_completion_tokens", {"max_completion_tokens": 500}, {}),
    ("both limits", {"max_tokens": 9, "max_completion_tokens": 500}, {}),
    ("min_tokens", {"min_tokens": 20, "max_tokens": 30}, {}),
    ("n", {"n": 4, "temperature": 0.5}, {"n": 4, "temperature": 0.5}),
    ("seed", {"seed": 7}, {"seed": 7}),
    ("stop", {"stop": ["a", "b"]}, {}),
    ("stop ids", {"stop_token_ids": [1], "ignore_eos": True}, {}),
    ("logprobs", {"logprobs": True, "top_logprobs": 5}, {}),
    ("completion logprobs", {"logprobs": 5, "echo": True}, {}),
    ("prompt_logprobs", {"prompt_logprobs": 1}, {}),
    ("token ids", {"return_token_ids": True, "return_tokens_as_token_ids": True}, {}),
    ("tools", {"tools": TOOLS, "tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "auto"}),
    ("required tool", {"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "required"}),
    ("response_format", {"response_format": SCHEMA}, {}),
    ("structured outputs", {"structured_outputs": {"choice": ["a"]}}, {}),
    (
        "template",
        {"chat_template_kwargs": {"x": 1}, "cache_salt": "s"},
        {"chat_template_kwargs": {"x": 1}, "cache_salt": "s"},
    ),
    ("truncation", {"truncate_prompt_tokens": 8}, {"truncate_prompt_tokens": 8}),
    ("what nobody knows yet", {"a_new_field": [1.50, "é"]}, {"a_new_field": [1.5, "é"]}),
]
LIMITS = {
    Route.COMPLETIONS: {"max_tokens": 1},
    Route.CHAT: {"max_tokens": 1, "max_completion_tokens": 1},
}


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize(("sent", "kept"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_prefill_leg_keeps_the_prompt_and_asks_for_one_token(
    route: Route, sent: dict[str, Any], kept: dict[str, Any]
) -> None:
    prompt: dict[str, Any] = {"prompt": "hi"} if route is Route.COMPLETIONS else {"messages": MESSAGES}
    body = json.dumps({"model": "m", **prompt, **sent}).encode()
    result = json.loads(encode(prefill_fields(route, parse_fields(body))))
    assert result == {"model": "m", **prompt, "stream": False, **LIMITS[route], **kept}


def test_prefill_leg_keeps_values_byte_for_byte() -> None:
    body = b'{"prompt": [1,  2],"temperature":0.10,"model":"\\u00e9"}'
    result = encode(prefill_fields(Route.COMPLETIONS, parse_fields(body)))
    assert b'"prompt":[1,  2]' in result
    assert b'"temperature":0.10' in result
    assert b'"model":"\\u00e9"' in result


def test_rewriting_leaves_the_decode_legs_fields_alone() -> None:
    fields = parse_fields(b'{"prompt":"x","stream":true,"max_tokens":9}')
    before = dict(fields)
    prefill_fields(Route.COMPLETIONS, fields)
    assert fields == before
