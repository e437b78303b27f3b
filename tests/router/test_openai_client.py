"""The `openai` package as a client: what it makes of answers that went through the router."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from router.rig import Rig, rigged
from router.stub import Cut, Reply, Seen, error_reply, json_reply, stream_reply

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def completion(message: dict[str, Any]) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    base = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    return json_reply({**base, "choices": [choice], "usage": USAGE})


def chunk(delta: dict[str, Any] | None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    content = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
    return b"data: " + json.dumps({**content, "usage": usage}).encode() + b"\n\n"


def chat(seen: Seen) -> Reply:
    if seen.body.get("stream"):
        ended = (chunk(None, USAGE),) if seen.body.get("stream_options") else ()
        events = (chunk({"role": "assistant", "content": ""}), chunk({"content": "a"}), chunk({"content": "b"}))
        return Reply(chunks=(*events, *ended, b"data: [DONE]\n\n"), content_type="text/event-stream")
    if seen.body.get("tools"):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return completion({"content": None, "tool_calls": [call]})
    if seen.body.get("response_format"):
        return completion({"content": '{"a": 1}'})
    return completion({"content": "ab"})


def client(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=rig.url + "/v1", api_key="k", max_retries=0, timeout=10.0)


async def test_sync_client_gets_a_completion() -> None:
    def ask(url: str) -> str | None:
        with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as sync:
            return (
                sync.chat.completions.create(model="m", messages=MESSAGES, max_completion_tokens=4)
                .choices[0]
                .message.content
            )

    async with rigged(decode=[chat]) as rig:
        assert await asyncio.to_thread(ask, rig.url) == "ab"
    assert rig.prefill.seen[0].body["max_completion_tokens"] == 1


async def test_streaming_client_gets_every_token_and_exactly_one_usage() -> None:
    async with rigged(decode=[chat]) as rig, client(rig) as asked:
        stream = await asked.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [part async for part in stream]
    assert "".join(part.choices[0].delta.content or "" for part in chunks if part.choices) == "ab"
    assert [part.usage.total_tokens for part in chunks if part.usage] == [5]


async def test_stream_that_its_client_read_to_the_last_event_counts_as_complete() -> None:
    async with rigged(decode=[chat]) as rig, client(rig) as asked:
        async for _ in await asked.chat.completions.create(model="m", messages=MESSAGES, stream=True):
            pass
        page = (await rig.get("/metrics")).body.decode()
    assert 'ending="client_left"' not in page


async def test_tools_and_structured_output_come_through() -> None:
    async with rigged(decode=[chat]) as rig, client(rig) as asked:
        called = await asked.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS, tool_choice="required")
        shaped = await asked.chat.completions.create(
            model="m", messages=MESSAGES, response_format={"type": "json_object"}
        )
    calls = called.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert json.loads(shaped.choices[0].message.content or "") == {"a": 1}
    assert rig.prefill.seen[0].body["tools"] == TOOLS, "the template shows the tools: the prompts would differ"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, openai.BadRequestError), (404, openai.NotFoundError), (429, openai.RateLimitError)],
)
async def test_engine_error_is_the_clients_own_exception(status: int, kind: type[openai.APIStatusError]) -> None:
    def decode(seen: Seen) -> Reply:
        return stream_reply(wait_s=30.0)

    async with rigged([lambda seen: error_reply(status, "from P")], [decode]) as rig, client(rig) as asked:
        with pytest.raises(kind, match="from P"):
            await asked.chat.completions.create(model="m", messages=MESSAGES)


async def test_stream_that_breaks_off_raises_in_the_client() -> None:
    events = (chunk({"content": "a"}), chunk({"content": "b"}))
    broken = Reply(chunks=events, content_type="text/event-stream", cut=Cut.MID_BODY)
    parts: list[object] = []

    async def read(asked: openai.AsyncOpenAI) -> None:
        stream = await asked.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        parts.extend([part async for part in take(stream, 1)])
        await anext(stream)

    async with rigged(decode=[lambda seen: broken]) as rig, client(rig) as asked:
        with pytest.raises(openai.APIError, match="decode engine"):
            await read(asked)
    assert len(parts) == 1


async def take(stream: AsyncIterator[object], count: int) -> AsyncIterator[object]:
    for _ in range(count):
        yield await anext(stream)


async def test_client_that_leaves_a_stream_ends_both_legs() -> None:
    endless = Reply(chunks=(chunk({"content": "a"}),) * 500, gap_s=0.02, content_type="text/event-stream")
    async with rigged(decode=[lambda seen: endless]) as rig, client(rig) as asked:
        stream = await asked.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        await anext(stream)
        await stream.close()
        await asyncio.wait_for(rig.decode.seen[0].ended.wait(), 2.0)
    assert rig.decode.seen[0].aborted


async def test_client_lists_the_models() -> None:
    def models(seen: Seen) -> Reply:
        return json_reply({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]})

    async with rigged(decode=[models]) as rig, client(rig) as asked:
        assert [model.id async for model in asked.models.list()] == ["m"]
