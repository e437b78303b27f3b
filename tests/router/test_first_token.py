"""The first token before the transfer: what a client gets early, and that it never gets a wrong text."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from router.rig import Rig, rigged
from router.stub import Cut, Reply, Seen, good_decode, good_prefill, stream_reply, until

from kvpush.core.errors import ConfigError
from kvpush.router.body import encode, parse_fields
from kvpush.router.config import Connector, EngineSpec, FirstTokenMode, RouterConfig
from kvpush.router.first_token import is_certain

DONE = b"data: [DONE]\n\n"
FAILED = b'data: {"error": {"message": "load failed", "code": 500}}\n\n'
SLOW_S = 30.0
Script = Callable[[Seen], Reply]


def chunk(content: dict[str, Any], finish: str | None = None, **fields: Any) -> bytes:
    """One event; `content` is a completion's `text`, or a chat's `delta`."""
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice], **fields}).encode() + b"\n\n"


def text(said: str, finish: str | None = None, **fields: Any) -> bytes:
    return chunk({"text": said}, finish, **fields)


def delta(finish: str | None = None, **said: Any) -> bytes:
    return chunk({"delta": said}, finish)


def events(*chunks: bytes, **settings: Any) -> Reply:
    return Reply(chunks=chunks, content_type="text/event-stream; charset=utf-8", head_first=True, **settings)


def prefill_with(*chunks: bytes) -> Script:
    return lambda seen: events(*chunks, DONE) if seen.body.get("stream") else good_prefill(seen)


SAMPLED = prefill_with(text("t0", "length"))
WHO = delta(role="assistant", content="")
CHAT_SAMPLED = prefill_with(WHO, delta("length", content="Hello"))


@contextlib.asynccontextmanager
async def forwarding(prefill: Script, decode: Script, label: str = "used", **settings: Any) -> Any:
    """A router that sends first tokens early, to a decode engine that says it begins with them."""
    async with rigged([prefill], [decode], first_token=FirstTokenMode.FORWARD, ready=False, **settings) as rig:
        rig.decode.engine_id = f'd0",first_token="{label}'
        await _seen_twice(rig)
        yield rig


async def _seen_twice(rig: Rig) -> None:
    """The label has been polled."""
    polls = rig.decode.polls
    await until(lambda: rig.decode.polls >= polls + 2)


async def ask(rig: Rig, path: str = "/v1/completions", **fields: Any) -> tuple[bytes, dict[str, str]]:
    """A stream as far as it came, and its headers."""
    asked = {"prompt": "word " * 40} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    received = b""
    async with rig.session.post(rig.url + path, json={"model": "m", "stream": True, **asked, **fields}) as answer:
        with contextlib.suppress(aiohttp.ClientPayloadError):
            while part := await answer.content.readany():
                received += part
        return received, {name.lower(): value for name, value in answer.headers.items()}


def said(received: bytes) -> str:
    """The text of all chunks."""
    parts = [json.loads(event[6:]) for event in received.split(b"\n\n") if event and event != DONE[:-2]]
    choices = [choice for part in parts for choice in part.get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def outcomes(rig: Rig) -> dict[str, float]:
    lines = (await rig.get("/metrics")).body.decode().splitlines()
    found = [line for line in lines if line.startswith("kvpush_router_first_token_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in found}


async def test_first_token_reaches_the_client_while_the_decode_engine_says_nothing() -> None:
    async with forwarding(SAMPLED, lambda seen: stream_reply(wait_s=SLOW_S)) as rig:
        body = {"prompt": "word " * 40, "stream": True}
        async with rig.session.post(rig.url + "/v1/completions", json=body) as answer:
            first = await answer.content.readuntil(b"\n\n")
            assert not rig.decode.written_bytes
            assert answer.headers["x-kvpush-first-token"] == "prefill"
        await until(rig.idle)
        await until(lambda: rig.decode.seen[0].aborted)
        assert await outcomes(rig) == {"unconfirmed": 1}
    chunk = json.loads(first[6:])
    assert chunk["choices"][0]["text"] == "t0"
    assert chunk["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize(
    "decoded",
    [
        pytest.param((text("t0"), text("t1"), text("t2", "length")), id="token by token"),
        pytest.param((text("t0t1"), text("t2", "length")), id="two tokens at once"),
        pytest.param((text(""), text("t"), text("0"), text("t1t2", "length")), id="in parts"),
        pytest.param((text("t0") + text("t1") + text("t2", "length"),), id="all at once"),
        pytest.param((text("t0")[:20], text("t0")[20:] + text("t1"), text("t2", "stop")), id="cut anywhere"),
    ],
)
async def test_no_text_comes_twice_or_is_missing_however_the_decode_engine_cuts_it(decoded: tuple[bytes, ...]) -> None:
    usage = b'data: {"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 3}}\n\n'
    async with forwarding(SAMPLED, lambda seen: events(*decoded, usage, DONE, wait_s=0.05)) as rig:
        received, headers = await ask(rig, stream_options={"include_usage": True})
        assert await outcomes(rig) == {"forwarded": 1}
    assert said(received) == "t0t1t2"
    assert received.endswith(usage + DONE)
    assert headers["x-kvpush-path"] == "pd"


async def test_answer_that_ends_with_its_first_token_keeps_its_ending() -> None:
    async with forwarding(SAMPLED, lambda seen: events(text("t0", "length"), DONE, wait_s=0.05)) as rig:
        received, _ = await ask(rig)
    first, last = (json.loads(event[6:])["choices"][0] for event in received.split(b"\n\n")[:2])
    assert (first["text"], first["finish_reason"]) == ("t0", None)
    assert (last["text"], last["finish_reason"]) == ("", "length")


async def test_chat_begins_with_one_role_and_goes_on_as_the_decode_engine_says() -> None:
    decoded = (WHO + delta(content="Hello"), delta(content=" there"), delta("stop", content=""))
    async with forwarding(CHAT_SAMPLED, lambda seen: events(*decoded, DONE, wait_s=0.05)) as rig:
        received, _ = await ask(rig, "/v1/chat/completions")
        assert await outcomes(rig) == {"forwarded": 1}
    assert said(received) == "Hello there"
    assert received.count(b'"role"') == 1
    assert b"stop_reason" not in received.split(b"\n\n")[1], "only the last chunk of a chat says why it ended"


@pytest.mark.parametrize(
    ("decoded", "outcome"),
    [
        pytest.param((text("other"), text("t1", "length"), DONE), "contradicted", id="another token"),
        pytest.param((text("t"), text("x", "length"), DONE), "contradicted", id="another token in parts"),
        pytest.param((text("t", "stop"), DONE), "contradicted", id="less text"),
        pytest.param((DONE,), "contradicted", id="no text"),
        pytest.param((FAILED, DONE), "unconfirmed", id="error"),
        pytest.param((text(""), FAILED, DONE), "unconfirmed", id="late error"),
        pytest.param((text("")[:9],), "unconfirmed", id="nothing whole"),
    ],
)
async def test_decode_engine_that_does_not_go_on_from_the_token_ends_the_answer_with_an_error(
    decoded: tuple[bytes, ...], outcome: str
) -> None:
    async with forwarding(SAMPLED, lambda seen: events(*decoded, wait_s=0.05)) as rig:
        received, _ = await ask(rig)
        page = (await rig.get("/metrics")).body.decode()
        assert await outcomes(rig) == {outcome: 1}
        await until(rig.idle)
    assert said(received) == "t0", "the client has seen what prefill sampled, and no other text"
    assert received.rstrip().split(b"\n\n")[-1].startswith(b'data: {"error"')
    assert DONE not in received
    assert 'kvpush_router_requests_total{ending="broken_off",path="pd"} 1.0' in page
    assert len(rig.decode.seen) == 1, "the first byte has gone: there is no second try"


async def test_decode_engine_that_dies_after_the_token_ends_the_answer_with_an_error() -> None:
    died = events(text("t0"), wait_s=0.05, cut=Cut.AFTER_HEAD)
    async with forwarding(SAMPLED, lambda seen: died) as rig:
        received, _ = await ask(rig)
        assert await outcomes(rig) == {"unconfirmed": 1}
    assert said(received) == "t0"
    assert DONE not in received


async def test_contradictions_are_no_fault_of_the_engine_but_stop_tokens_from_being_sent_early() -> None:
    async with forwarding(SAMPLED, lambda seen: events(text("x"), text("y", "length"), DONE, wait_s=0.05)) as rig:
        texts = [said((await ask(rig))[0]) for _ in range(4)]
        assert await outcomes(rig) == {"contradicted": 3, "distrusted": 1}
        page = (await rig.get("/metrics")).body.decode()
    assert texts == ["t0", "t0", "t0", "xy"]
    assert f'kvpush_router_engine_breaker{{engine="{rig.decode.url}",role="decode",state="closed"}} 1.0' in page


@pytest.mark.parametrize(
    "sampled",
    [
        pytest.param((text("t0", "stop"),), id="the end"),
        pytest.param((text("", "length"),), id="part of a character"),
        pytest.param((text("\ufffd", "length"),), id="a replacement character"),
        pytest.param((text("t0", "length", usage={"prompt_tokens": 3}),), id="counted"),
        pytest.param((WHO, delta("length", content="<")), id="what may be a marker"),
        pytest.param((WHO, delta("length", reasoning="t0", content="t0")), id="reasoning"),
        pytest.param((), id="nothing"),
    ],
)
async def test_what_is_not_plain_text_is_left_to_the_decode_engine(sampled: tuple[bytes, ...]) -> None:
    async with forwarding(prefill_with(*sampled), lambda seen: stream_reply(wait_s=0.05)) as rig:
        received, headers = await ask(rig)
        assert await outcomes(rig) == {"no_text": 1}
    assert said(received) == "t0t1t2"
    assert "x-kvpush-first-token" not in headers


@pytest.mark.parametrize("label", ["unused", ""])
async def test_decode_engine_that_does_not_say_it_begins_with_tokens_is_waited_for(label: str) -> None:
    async with forwarding(SAMPLED, lambda seen: events(text("other", "length"), DONE, wait_s=0.05), label) as rig:
        received, _ = await ask(rig)
        assert await outcomes(rig) == {"unsupported": 1}
    assert said(received) == "other"


async def test_prefill_engine_that_breaks_off_before_its_token_is_tried_again() -> None:
    cut = events(text("t0", "length"), cut=Cut.AFTER_HEAD)
    async with forwarding(lambda seen: cut, lambda seen: stream_reply(wait_s=SLOW_S)) as rig:
        async with rig.session.post(rig.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert answer.status == 502
        assert len(rig.prefill.seen) == 2
        assert await outcomes(rig) == {"undecided": 1}


async def test_prefill_leg_is_a_stream_only_for_streams_that_can_begin_early() -> None:
    async with forwarding(SAMPLED, good_decode) as rig:
        for fields in ({}, {"logprobs": 0}, {"stream": False}):
            await ask(rig, **fields)
        assert (await outcomes(rig))["excluded"] == 1
    assert [seen.body["stream"] for seen in rig.prefill.seen] == [True, False, False]
    assert all(seen.body["max_tokens"] == 1 for seen in rig.prefill.seen)


CERTAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "logit_bias": {"5": 1}},
    {"max_tokens": 2, "max_completion_tokens": None, "n": 1, "ignore_eos": True, "seed": None},
    {"stream_options": {"include_usage": True}, "presence_penalty": 0, "frequency_penalty": 0.0, "min_tokens": 0},
    {"stop": [], "logprobs": False, "tools": [], "echo": False, "stop_token_ids": [], "user": "me"},
]
UNCERTAIN: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_completion_tokens": 1, "max_tokens": 9},
    {"max_tokens": "9"},
    {"n": 2},
    {"seed": 0},
    {"stop": "x"},
    {"stop": ["x"]},
    {"stop_token_ids": [1]},
    {"logprobs": 0},
    {"logprobs": True},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "auto"},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["a"]}},
    {"presence_penalty": 0.5},
    {"min_tokens": 3},
    {"bad_words": ["x"]},
    {"thinking_token_budget": 0},
    {"include_reasoning": False},
    {"return_token_ids": True},
    {"echo": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": 7},
    {"a_new_field": 1},
]


@pytest.mark.parametrize("fields", CERTAIN)
def test_requests_whose_beginning_is_certain_may_begin_early(fields: dict[str, Any]) -> None:
    assert is_certain(parse_fields(json.dumps({"model": "m", "prompt": "x", "stream": True, **fields}).encode()))


@pytest.mark.parametrize("fields", UNCERTAIN, ids=json.dumps)
def test_requests_that_might_begin_otherwise_may_not(fields: dict[str, Any]) -> None:
    assert not is_certain(parse_fields(encode({"model": "m", "messages": [], **fields})))


def test_forwarding_is_refused_for_connectors_whose_decode_engines_sample() -> None:
    engine = EngineSpec(url="http://h:1")
    with pytest.raises(ConfigError, match="first_token: 'forward' with connector 'none'"):
        RouterConfig(decode=(engine,), connector=Connector.NONE, first_token=FirstTokenMode.FORWARD)
