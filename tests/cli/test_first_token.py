"""`kvpush up --first-token` with real engines: the client has the first token while the decode engine stands still."""

import json
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from cli.processes import wait_until

from kvpush.cli.cluster import Cluster
from kvpush.cli.parts import FIRST_TOKEN_ARGS, FORWARD_ARGS
from kvpush.cli.up import make_spec

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
pytest.importorskip("vllm")

TEXT = "The five boxing wizards jump quickly; pack my box. " * 6
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": 12,
    "temperature": 0,
}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    spec = make_spec(
        "tiny",
        log_dir=tmp_path_factory.mktemp("logs"),
        vllm_args=("--max-model-len", "2048"),
        decode_args=FIRST_TOKEN_ARGS,
        router_args=FORWARD_ARGS,
    )
    with Cluster(spec, lambda status: None) as running:
        yield running


class Stream:
    """An open stream of events."""

    def __init__(self, url: str, route: str, **body: Any) -> None:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(url + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
        self._response = urllib.request.urlopen(request, timeout=100)
        self.is_early = self._response.headers["x-kvpush-first-token"] == "prefill"

    def chunk(self) -> dict[str, Any] | None:
        """The next chunk, None at the end."""
        while line := self._response.readline():
            if line == b"data: [DONE]\n":
                self._response.close()
                return None
            if line.startswith(b"data: "):
                chunk: dict[str, Any] = json.loads(line[6:])
                return chunk
        raise AssertionError("the stream broke off")

    def rest(self) -> list[dict[str, Any]]:
        """All chunks to the end."""
        chunks = []
        while (chunk := self.chunk()) is not None:
            chunks.append(chunk)
        return chunks


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def shape_of(chunks: list[dict[str, Any]]) -> list[Any]:
    """What is the same for each answer to the same question, with tokens that came together taken apart."""
    roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"] if "delta" in choice]
    endings = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return [
        text_of(chunks),
        [role for role in roles if role],
        [ending for ending in endings if ending],
        [chunk["usage"] for chunk in chunks if chunk.get("usage")],
    ]


def outcomes(cluster: Cluster) -> dict[str, float]:
    """What became of first tokens, as the router counts."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    ours = [line for line in lines if line.startswith("kvpush_router_first_token_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in ours}


@pytest.mark.parametrize(("route", "body"), ROUTES, ids=["completion", "chat"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_streams_are_those_of_one_engine_with_their_beginning_from_prefill(
    cluster: Cluster, route: str, body: dict[str, Any], temperature: float
) -> None:
    early = 0
    for turn in range(6):
        asked = {**body, "cache_salt": f"{temperature} {turn % 3}", "temperature": temperature}
        through = Stream(cluster.url, route, **asked)
        early += through.is_early
        chunks = through.rest()
        assert len({chunk["id"] for chunk in chunks}) == 1
        if not temperature:
            alone = Stream(cluster.decode[0].url, route, **{**asked, "cache_salt": f"alone {turn}"}).rest()
            assert shape_of(chunks) == shape_of(alone)
        assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert early > 0
    wait_until(lambda: outcomes(cluster).get("forwarded", 0) >= early)
    assert not {"contradicted", "unconfirmed"} & outcomes(cluster).keys()


def test_first_token_is_with_the_client_before_the_decode_engine_has_taken_a_step(cluster: Cluster) -> None:
    expected = Stream(cluster.url, "/v1/completions", **COMPLETION).rest()
    decode = psutil.Process(cluster.pids()["decode-0"]).children(recursive=True)
    for process in decode:
        process.send_signal(signal.SIGSTOP)
    try:
        stream = Stream(cluster.url, "/v1/completions", **{**COMPLETION, "cache_salt": "stopped"})
        first = stream.chunk()
    finally:
        for process in decode:
            process.send_signal(signal.SIGCONT)
    assert first is not None
    assert stream.is_early
    assert text_of([first])
    assert text_of([first, *stream.rest()]) == text_of(expected)
