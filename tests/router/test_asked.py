"""What the router understands of a body, and what it leaves to the engines."""

import pytest

from kvpush.router.answers import RequestRefused
from kvpush.router.asked import Local, count_prompts, estimate_tokens, parse_asked
from kvpush.router.body import Route


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(b'"a"', 1), (b'["a","b","c"]', 3), (b"[1,2,3]", 1), (b"[[1,2],[3]]", 2), (b"[]", 1), (b"", 1), (b"[oops", 1)],
)
def test_prompts_are_counted(prompt: bytes, count: int) -> None:
    assert count_prompts(prompt) == count


@pytest.mark.parametrize(
    ("text", "tokens"), [(b"[1,2,3]", 3), (b"[[1,2],[3]]", 3), (b"[]", 0), (b'"' + b"x" * 398 + b'"', 100)]
)
def test_token_ids_are_counted_and_text_is_estimated(text: bytes, tokens: int) -> None:
    assert estimate_tokens(text, 4.0) == tokens


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (b'"prompt_logprobs":0', Local.PROMPT_LOGPROBS),
        (b'"echo":true,"logprobs":1', Local.PROMPT_LOGPROBS),
        (b'"echo":true', None),
        (b'"logprobs":5', None),
        (b'"use_beam_search":true', Local.BEAM_SEARCH),
        (b'"truncate_prompt_tokens":-1', Local.TRUNCATION),
        (b'"truncate_prompt_tokens":5', None),
        (b'"prompt_logprobs":"nonsense"', None),
    ],
)
def test_requests_that_cannot_be_split_say_why(fields: bytes, reason: Local | None) -> None:
    assert parse_asked(Route.COMPLETIONS, b'{"prompt":"x",' + fields + b"}").must_be_local is reason


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b'{"prompt": }', b"\xff\xfe"])
def test_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_asked(Route.COMPLETIONS, body)
    assert refused.value.answer.status == 400


def test_sub_requests_are_prompts_times_n() -> None:
    assert parse_asked(Route.COMPLETIONS, b'{"prompt":["a","b"],"n":3}').sub_requests == 6
