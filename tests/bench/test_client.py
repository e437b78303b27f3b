import itertools

import aiohttp
import pytest
from bench.stub import Script, serving

from kvpush.bench.client import Answer, Target, complete
from kvpush.bench.workload import Prompt

PROMPT = Prompt((4, 5, 6), 3)


async def ask(script: Script, timeout_s: float = 5.0) -> Answer:
    async with serving(script) as target, aiohttp.ClientSession() as session:
        return await complete(session, Target(target.url, target.model, timeout_s), PROMPT, "me-0")


async def test_client_times_the_first_text_and_each_further_one() -> None:
    answer = await ask(Script(first_s=0.05, gap_s=0.02))
    assert (answer.error, answer.text, answer.output_tokens) == ("", " a b c", 3)
    assert answer.transfer_id == "f" * 32
    assert answer.chunks[0] - answer.sent >= 0.05
    assert all(later - earlier >= 0.015 for earlier, later in itertools.pairwise(answer.chunks))
    assert answer.ended >= answer.chunks[-1]


async def test_client_asks_for_exactly_what_the_workload_says() -> None:
    script = Script()
    await ask(script)
    body = script.bodies[0]
    assert body["prompt"] == "w0004 w0005 w0006"
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["temperature"]) == (3, True, True, 0.0)
    assert script.request_ids == ["me-0"]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(status=404), "HTTP 404: no such model"),
        (Script(cut_after=1), "ClientPayloadError"),
        (Script(error_after=2), "engine died"),
        (Script(texts=(" a",), completion_tokens=1), "1 of 3 tokens"),
    ],
)
async def test_answer_that_goes_wrong_carries_its_error(script: Script, error: str) -> None:
    assert error in (await ask(script)).error


async def test_answer_that_takes_too_long_has_failed() -> None:
    assert "Timeout" in (await ask(Script(first_s=4.0), timeout_s=0.1)).error


async def test_server_that_is_not_there_is_an_error_in_the_answer() -> None:
    async with aiohttp.ClientSession() as session:
        answer = await complete(session, Target("http://127.0.0.1:9", "x"), PROMPT, "me-0")
    assert "Cannot connect" in answer.error
