"""Prompts that do not come to a real decode engine: it computes them, the text is right, and the answer says so."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio
from router.rig import until_true

from kvpush.cli.cluster import Cluster
from kvpush.cli.parts import LoadFailurePolicy
from kvpush.cli.up import make_spec
from kvpush.core.ids import Address, EngineId
from kvpush.router.app import running
from kvpush.router.config import EngineSpec, RouterConfig, SelfCheckMode

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
pytest.importorskip("vllm")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Jackdaws love my big sphinx of quartz. " * 6
_TOGETHER = 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One engine of each kind; what does not come is computed."""
    spec = make_spec(
        "tiny",
        log_dir=tmp_path_factory.mktemp("logs"),
        load_failure_policy=LoadFailurePolicy.RECOMPUTE,
        vllm_args=("--max-model-len", "2048"),
    )
    with Cluster(replace(spec, connector_config={"connect_timeout_s": 1.0})) as started:
        yield started


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as opened:
        yield opened


@asynccontextmanager
async def astray(session: aiohttp.ClientSession, cluster: Cluster) -> AsyncIterator[str]:
    """A router over the same engines, which tells the decode engine to expect prompts from where nobody listens."""
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    nobody = Address(prefill.host, 9)
    config = RouterConfig(
        prefill=(EngineSpec(url=prefill.url, control=nobody, engine_id=EngineId("nobody")),),
        decode=(EngineSpec(url=decode.url),),
        port=0,
        self_check=SelfCheckMode.OFF,
    )
    async with running(config) as url:

        async def is_ready() -> bool:
            async with session.get(url + "/health") as response:
                return response.status == 200

        await until_true(is_ready, 30.0)
        yield url


@dataclass(frozen=True)
class Said:
    status: int
    path: str
    texts: tuple[str, ...]


async def ask(session: aiohttp.ClientSession, url: str, **body: Any) -> Said:
    """An answer's path and the text of each of its choices, however it comes."""
    fields = {"model": "tiny", "max_tokens": 12, "temperature": 0} | body
    async with session.post(url, json=fields) as response:
        content = await response.read()
        path = response.headers.get("x-kvpush-path", "")
        return Said(response.status, path, _texts(content, response.content_type))


def _texts(content: bytes, kind: str) -> tuple[str, ...]:
    chunks = [content]
    if kind == "text/event-stream":
        chunks = [event[len(b"data: ") :] for event in content.split(b"\n\n") if event[:7] == b"data: {"]
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in json.loads(chunk).get("choices", ())):
        said = choice if "text" in choice else choice.get("delta") or choice["message"]
        texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("text") or said.get("content") or "")
    return tuple(texts[index] for index in sorted(texts))


def asking(number: str, route: str, **body: Any) -> dict[str, Any]:
    """A prompt that no engine has seen."""
    text = f"{number} {PROMPT}"
    return {**({"prompt": text} if route == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}), **body}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize(
    ("route", "more"),
    [
        (COMPLETIONS, {}),
        (CHAT, {}),
        (COMPLETIONS, {"n": 2, "temperature": 0.8, "seed": 7}),
        (COMPLETIONS, {"prompt": [f"first {PROMPT}", f"second {PROMPT}"]}),
    ],
    ids=["completion", "chat", "n", "list"],
)
async def test_answer_to_a_prompt_that_did_not_come_is_right_and_says_how_it_was_made(
    cluster: Cluster, session: aiohttp.ClientSession, route: str, more: dict[str, Any], stream: bool
) -> None:
    body = asking(f"{route} {more} {stream}", route, stream=stream, **more)
    body["cache_salt"] = f"lost-{uuid4().hex}"
    async with astray(session, cluster) as url:
        lost = await ask(session, url + route, **body)
    came = await ask(session, cluster.url + route, **{**body, "cache_salt": f"came-{uuid4().hex}"})
    alone = await ask(session, cluster.decode[0].url + route, **{**body, "cache_salt": "alone"})
    assert (lost.status, lost.path) == (200, "recomputed")
    assert (came.status, came.path) == (200, "pd")
    assert lost.texts == came.texts == alone.texts
    assert all(alone.texts)
    assert alone.path == "", "nobody was to send that one"


async def test_of_many_answers_at_once_each_says_which_path_it_took(
    cluster: Cluster, session: aiohttp.ClientSession
) -> None:
    bodies = [asking(f"together {number}", COMPLETIONS, stream=number % 2 == 0) for number in range(2 * _TOGETHER)]
    async with astray(session, cluster) as url:
        urls = [url, cluster.url]
        tasks = [ask(session, urls[number // 2 % 2] + COMPLETIONS, **body) for number, body in enumerate(bodies)]
        answers = await asyncio.gather(*tasks)
        async with session.get(url + "/metrics") as response:
            page = await response.text()
    decode = cluster.decode[0].url + COMPLETIONS
    alone = await asyncio.gather(*(ask(session, decode, **body, cache_salt="alone") for body in bodies))
    paths = [("recomputed", "pd")[number // 2 % 2] for number in range(2 * _TOGETHER)]
    assert [answer.path for answer in answers] == paths
    assert [answer.texts for answer in answers] == [answer.texts for answer in alone]
    assert f'kvpush_router_requests_total{{ending="complete",path="recomputed"}} {_TOGETHER}.0' in page
