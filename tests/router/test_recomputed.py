"""A decode engine that has computed the prompt itself says so; the router tells clients, its counters and its log."""

import json
import logging
from dataclasses import replace

import pytest
from router.rig import Rig, rigged
from router.stub import Reply, Seen, error_reply, good_decode, good_prefill, until
from router.test_first_token import DONE, SAMPLED, ask, events, forwarding, outcomes, text

SAYS = {"x-kvpush-path": "recomputed"}


def recomputing(seen: Seen) -> Reply:
    return replace(good_decode(seen), headers=SAYS)


async def counted(rig: Rig) -> dict[str, float]:
    """Complete answers by their path, and by the path in the histogram of first bytes."""
    lines = (await rig.get("/metrics")).body.decode().splitlines()
    counts = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name.startswith(("kvpush_router_requests_total{", "kvpush_router_first_byte_seconds_count{")):
            counts[name.removeprefix("kvpush_router_")] = float(value)
    return counts


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_client_counters_and_log_are_told(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvpush.router.request")
    async with rigged(decode=[recomputing]) as rig:
        answer = await rig.post(stream=stream)
        await until(lambda: bool(caplog.records))
        counts = await counted(rig)
    assert (answer.status, answer.path) == (200, "recomputed")
    assert counts == {
        'requests_total{ending="complete",path="recomputed"}': 1,
        'first_byte_seconds_count{path="recomputed"}': 1,
    }
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "kvpush.router.request"]
    assert line["path"] == "recomputed"
    assert line["prefill"], "both engines were asked"
    assert line["tries"] == 1


@pytest.mark.parametrize("value", ["pd", "local", "Recomputed", "recomputed, recomputed", "recomputed;q=1", ""])
async def test_nothing_else_that_a_decode_engine_says_of_its_path_counts(value: str) -> None:
    async with rigged(decode=[lambda seen: replace(good_decode(seen), headers={"x-kvpush-path": value})]) as rig:
        answer = await rig.post()
    assert answer.path == "pd"


async def test_only_the_decode_engine_is_believed() -> None:
    async with rigged(prefill=[lambda seen: replace(good_prefill(seen), headers=SAYS)]) as rig:
        answer = await rig.post(headers={"X-Kvpush-Path": "recomputed", "X-Request-Id": "mine"})
        (seen,) = rig.decode.seen
    assert answer.path == "pd"
    assert "x-kvpush-path" not in seen.headers
    assert seen.headers["x-request-id"] == seen.params["transfer_id"], "by which the engine finds what has become of it"


async def test_prompt_that_was_not_to_come_is_not_called_recomputed() -> None:
    async with rigged(decode=[recomputing], local_below_tokens=10_000) as rig:
        assert (await rig.post()).path == "local"
        assert (await rig.post("/v1/responses", input="x")).path == "local"


async def test_retry_says_for_itself_which_path_it_took() -> None:
    """What a failed answer says of its path is nobody's business."""
    async with rigged(decode=[lambda seen: error_reply(500, headers=SAYS), good_decode]) as rig:
        answers = [await rig.post() for _ in range(8)]
        assert all(stub.seen for stub in rig.decodes)
    assert {(answer.status, answer.path) for answer in answers} == {(200, "pd")}


async def test_answer_that_began_before_the_decode_engine_knew_is_counted_and_logged_as_recomputed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its head has left with the first token, which the prefill engine has sampled."""
    caplog.set_level(logging.INFO, logger="kvpush.router.request")
    decoded = events(text("t0"), text("t1", "length"), DONE, wait_s=0.05, headers=SAYS)
    async with forwarding(SAMPLED, lambda seen: decoded) as rig:
        _, headers = await ask(rig)
        assert await outcomes(rig) == {"forwarded": 1}
        counts = await counted(rig)
    assert headers["x-kvpush-path"] == "pd"
    assert counts == {
        'requests_total{ending="complete",path="recomputed"}': 1,
        'first_byte_seconds_count{path="pd"}': 1,
    }
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "kvpush.router.request"]
    assert line["path"] == "recomputed"
