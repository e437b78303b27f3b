"""One streaming completion over HTTP, timed as `vllm bench serve` times it."""

import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvpush.bench.workload import Prompt


class Answer(msgspec.Struct, kw_only=True):
    """What came back. Times are monotonic seconds; `chunks` are the arrivals of text, the first token first.

    `error` is "" when the stream ended as it should.
    """

    request_id: str
    sent: float
    ended: float
    chunks: tuple[float, ...] = ()
    text: str = ""
    output_tokens: int = 0
    path: str = ""
    transfer_id: str = ""
    error: str = ""


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True)
class Target:
    """Where to send: base URL and the model's name there. A request that takes longer than `timeout_s` has failed."""

    url: str
    model: str
    timeout_s: float = 120.0


async def complete(session: aiohttp.ClientSession, target: Target, prompt: Prompt, request_id: str) -> Answer:
    """Send one request and read its stream to the end. Errors are in the answer, never raised."""
    answer = Answer(request_id=request_id, sent=time.monotonic(), ended=0.0)
    body = {
        "model": target.model,
        "prompt": prompt.text,
        "max_tokens": prompt.output,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post(
            f"{target.url}/v1/completions",
            json=body,
            headers={"X-Request-Id": request_id},
            timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        ) as response:
            answer.path = response.headers.get("x-kvpush-path", "")
            answer.transfer_id = response.headers.get("x-kvpush-transfer-id", "")
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:500]}"
            else:
                await _read_stream(response, answer)
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    if not answer.error and answer.output_tokens != prompt.output:
        answer.error = f"{answer.output_tokens} of {prompt.output} tokens"
    return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    chunks: list[float] = []
    texts: list[str] = []
    finished = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            finished = True
            break
        chunk = _decoder.decode(data)
        if chunk.error is not None:
            answer.error = f"stream: {chunk.error}"
        if chunk.choices and chunk.choices[0].text:
            chunks.append(time.monotonic())
            texts.append(chunk.choices[0].text)
        if chunk.usage is not None:
            answer.output_tokens = chunk.usage.completion_tokens
    answer.chunks = tuple(chunks)
    answer.text = "".join(texts)
    if not finished and not answer.error:
        answer.error = "the stream ended before [DONE]"
