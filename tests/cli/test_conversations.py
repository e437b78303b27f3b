"""A conversation over HTTP, a router, two prefill and two decode engines: the text of one engine, and nothing twice."""

import http.client
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvpush.cli.cluster import Cluster
from kvpush.cli.up import make_spec
from kvpush.core.digests import GRANULE
from kvpush.router.config import ConversationMode

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
pytest.importorskip("vllm")

_SMALL = ("--max-model-len", "2048", "--no-enable-prefix-caching")
_TURNS = 6
_ANSWERED = 24


def request(url: str, method: str, path: str, key: str, body: object = None) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request(method, path, json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content
    return content


def talk(url: str, key: str) -> list[list[int]]:
    """Six turns, each with all before it; returns the tokens of each answer."""
    said: list[int] = []
    answers = []
    for turn in range(_TURNS):
        said = [*said, *(3 + (37 * turn + 11 * i) % 200 for i in range(45))]
        body = {"model": "tiny", "prompt": said, "max_tokens": _ANSWERED, "temperature": 0, "return_token_ids": True}
        (choice,) = json.loads(request(url, "POST", "/v1/completions", key, {**body, "ignore_eos": True}))["choices"]
        answers.append(choice["token_ids"])
        said = [*said, *choice["token_ids"]]
    return answers


def reused(url: str) -> int:
    page = request(url, "GET", "/metrics", "").decode()
    found = re.search(r"^kvpush_router_reused_tokens_total (\S+)", page, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_conversation_over_two_prefill_and_two_decode_engines(tmp_path: Path) -> None:
    mode, args = ConversationMode.ON, _SMALL
    spec = make_spec("tiny", prefill=2, decode=2, block_size=32, conversations=mode, log_dir=tmp_path, vllm_args=args)
    left = [45 * turn + _ANSWERED * turn - 1 for turn in range(1, _TURNS)]
    all_that_was_held = sum(tokens - tokens % GRANULE for tokens in left)
    with Cluster(spec) as cluster:
        alone = talk(cluster.decode[0].url, "nobody")
        assert talk(cluster.url, "one") == alone
        assert reused(cluster.url) == all_that_was_held
        assert talk(cluster.url, "another") == alone
        assert reused(cluster.url) == 2 * all_that_was_held, "each has its own"
