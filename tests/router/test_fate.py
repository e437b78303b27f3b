"""Both legs, one fate: what a client and the other engine see when a leg fails (cases B52, B54, B57)."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import aiohttp
import pytest
from router.rig import Rig, rigged
from router.stub import (
    Cut,
    Reply,
    Seen,
    error_reply,
    event,
    good_decode,
    good_prefill,
    json_reply,
    running_stub,
    stream_reply,
    until,
)

from kvpush.router import pair
from kvpush.router.config import Connector, PrefillLoss

PROMPTLY_S = 2.0  # against answers that take SLOW_S; what is promised, 0.2 s, is measured once below
SLOW_S = 30.0


def always(reply: Reply) -> Callable[[Seen], Reply]:
    return lambda seen: reply


def slow_decode(seen: Seen) -> Reply:
    return stream_reply(wait_s=SLOW_S)


BROKEN_JSON = Reply(chunks=(b'{"choices": [',))
RESET = json_reply({}, cut=Cut.BEFORE_HEAD)


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
@pytest.mark.parametrize("stream", [True, False])
async def test_prefill_engines_error_reaches_the_client_at_once_and_ends_the_decode_leg(
    status: int, wait_s: float, stream: bool
) -> None:
    async with rigged([always(error_reply(status, "from P", wait_s=wait_s))], [slow_decode]) as rig:
        answer = await asyncio.wait_for(rig.post(stream=stream), PROMPTLY_S)
        await until(rig.idle, PROMPTLY_S)
    assert answer.status == status
    assert answer.json["error"]["message"] == "from P"
    assert rig.decode.seen[0].aborted


async def test_prefill_engines_error_takes_less_than_200_ms_to_client_and_decode_engine() -> None:
    took_s = []
    async with rigged([always(error_reply(400))], [slow_decode]) as rig:
        for _ in range(5):
            started = time.monotonic()
            await rig.post()
            await until(rig.idle, PROMPTLY_S)
            took_s.append(time.monotonic() - started)
    assert min(took_s) < 0.2, "the best of five, because other work may share the machine"


@pytest.mark.parametrize(
    "reply",
    [BROKEN_JSON, RESET, replace(RESET, cut=Cut.AFTER_HEAD), replace(RESET, cut=Cut.MID_BODY), Reply(chunks=())],
    ids=["broken json", "reset", "reset after head", "reset mid-body", "empty"],
)
async def test_prefill_leg_that_breaks_is_a_502_and_ends_the_decode_leg(reply: Reply) -> None:
    async with rigged([always(reply)], [slow_decode]) as rig:
        answer = await rig.post()
        await until(rig.idle, PROMPTLY_S)
    assert answer.status == 502
    assert rig.prefill.url in str(answer.json) or "prefill" in answer.json["error"]["message"]
    assert all(seen.aborted for seen in rig.decode.seen)


@pytest.mark.parametrize("status", [400, 500])
async def test_decode_engines_error_ends_the_prefill_leg(status: int) -> None:
    slow = always(json_reply({}, wait_s=SLOW_S))
    async with rigged([slow], [always(error_reply(status, "from D"))]) as rig:
        answer = await rig.post()
        await until(rig.idle, PROMPTLY_S)
    assert answer.status == status
    assert rig.prefill.seen[0].aborted


async def test_prefill_leg_ends_at_once_when_the_decode_engine_is_not_there_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What P would compute in a time of grace would be held for nobody until its lease ends (case B16)."""
    monkeypatch.setattr(pair, "CAUSE_GRACE_S", SLOW_S)
    key = {"Authorization": "Bearer k"}
    async with rigged([always(json_reply({}, wait_s=SLOW_S))], poll_s=60.0, admin_key="k") as rig:
        async with running_stub(good_decode) as gone:
            add = {"role": "decode", "engine": gone.url}
            await rig.session.post(rig.url + "/admin/engines", json=add, headers=key)
            await until(lambda: gone.polls > 0)
            await rig.session.delete(rig.url + "/admin/engines", json={"engine": rig.decode.url}, headers=key)
        answer = await asyncio.wait_for(rig.post(), PROMPTLY_S)
        await until(rig.idle, PROMPTLY_S)
    assert answer.status == 502
    assert gone.url.removeprefix("http://") in answer.json["error"]["message"]
    assert [seen.aborted for seen in rig.prefill.seen] == [True]


async def test_error_in_the_first_event_of_a_stream_becomes_the_answers_status() -> None:
    failed = Reply(
        chunks=(b'data: {"error":{"message":"kv load failed","code":500}}\n\n', b"data: [DONE]\n\n"),
        content_type="text/event-stream",
    )
    async with rigged(decode=[always(failed)]) as rig:
        answer = await rig.post(stream=True)
    assert answer.status == 500
    assert answer.json["error"]["message"] == "kv load failed"


async def test_failed_prefill_is_retried_on_another_pair_with_a_fresh_transfer_id() -> None:
    rigs: list[Rig] = []
    tries_alive_together: list[int] = []

    def note() -> None:
        tries_alive_together.append(len({transfer_id for _, transfer_id in rigs[0].live_ids()}))

    def prefill(seen: Seen) -> Reply:
        note()
        is_first = sum(len(stub.seen) for stub in rigs[0].prefills) == 1
        return error_reply(503, wait_s=0.05) if is_first else good_prefill(seen)

    def decode(seen: Seen) -> Reply:
        note()
        return slow_decode(seen) if len(rigs[0].decode.seen) == 1 else good_decode(seen)

    async with rigged([prefill, prefill], [decode]) as rig:
        rigs.append(rig)
        answer = await rig.post()
    legs = [seen.params["transfer_id"] for stub in rig.stubs for seen in stub.seen]
    assert answer.status == 200
    assert sorted(legs.count(transfer_id) for transfer_id in set(legs)) == [2, 2]
    assert max(tries_alive_together) == 1
    assert [len(stub.seen) for stub in rig.prefills] == [1, 1]


async def test_failed_decode_engine_is_avoided_by_the_retry() -> None:
    bad, good = always(error_reply(500)), good_decode
    async with rigged(decode=[bad, good]) as rig:
        statuses = [(await rig.post()).status for _ in range(8)]
    assert statuses == [200] * 8


async def test_client_errors_are_not_retried_and_never_count_against_an_engine() -> None:
    async with rigged([always(error_reply(400))] * 2, [slow_decode]) as rig:
        for _ in range(10):
            assert (await rig.post()).status == 400
        page = (await rig.get("/metrics")).body.decode()
    assert sum(len(stub.seen) for stub in rig.prefills) == 10
    assert 'state="open"' not in page


async def test_connection_reset_of_the_only_pair_is_retried_once_with_a_fresh_id() -> None:
    async with rigged([always(RESET)], [slow_decode]) as rig:
        answer = await rig.post()
        await until(rig.idle, PROMPTLY_S)
    ids = [seen.params["transfer_id"] for seen in rig.prefill.seen]
    assert answer.status == 502
    assert len(ids) == len(set(ids)) == 2


async def test_stream_that_breaks_off_ends_with_an_error_event_and_no_clean_end() -> None:
    async with rigged(decode=[always(stream_reply(5, gap_s=0.01, cut=Cut.MID_BODY))]) as rig:
        received = b""
        async with rig.session.post(rig.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            while not answer.content.exception():
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    received += await answer.content.readany()
    events = [part for part in received.split(b"\n\n") if part]
    assert b'{"error"' in events[-1]
    assert all(part.startswith(b"data: {") for part in events), "an event was passed on in part"
    assert b"[DONE]" not in received
    assert received.startswith(event("t0"))


async def test_plain_answer_that_breaks_off_has_no_clean_end() -> None:
    halves = Reply(chunks=(b'{"choices": [', b'{"text": "x"}]}'), cut=Cut.MID_BODY, gap_s=0.05)
    async with rigged(decode=[always(halves)]) as rig:
        with pytest.raises(aiohttp.ClientPayloadError):
            await rig.post()


async def test_prefill_failure_falls_back_to_the_decode_engine_only_when_told_to() -> None:
    def decode(seen: Seen) -> Reply:
        return slow_decode(seen) if "kv_transfer_params" in seen.body else good_decode(seen)

    async with rigged([always(error_reply(500))], [decode], prefill_loss=PrefillLoss.RECOMPUTE) as rig:
        answer = await rig.post()
        page = (await rig.get("/metrics")).body.decode()
    assert answer.status == 200
    assert answer.path == "recomputed"
    assert "kv_transfer_params" not in rig.decode.seen[-1].body
    assert 'kvpush_router_requests_total{ending="complete",path="recomputed"} 1.0' in page


async def test_pull_answers_502_when_the_prefill_engine_hands_nothing_over() -> None:
    async with rigged([always(json_reply({"choices": []}))], connector=Connector.VLLM_PULL) as rig:
        answer = await rig.post()
    assert answer.status == 502
    assert "kv_transfer_params" in answer.json["error"]["message"]
    assert not rig.decode.seen


async def test_prefill_leg_that_outlives_the_answer_is_ended() -> None:
    async with rigged([always(json_reply({}, wait_s=SLOW_S))], [good_decode]) as rig:
        answer = await rig.post()
        await until(rig.idle, 2.0)
    assert answer.status == 200
    assert rig.prefill.seen[0].aborted


async def test_keepalive_client_does_not_wait_for_a_prefill_leg_that_is_being_ended() -> None:
    async with rigged([always(json_reply({}, wait_s=SLOW_S))], [good_decode]) as rig:
        await rig.post()
        started = time.monotonic()
        await rig.get("/health")
        assert time.monotonic() - started < 0.1


async def test_silent_engine_is_a_504_within_the_configured_bound() -> None:
    async with rigged([always(json_reply({}, wait_s=SLOW_S))], [slow_decode], first_byte_timeout_s=0.3) as rig:
        answer = await rig.post()
        await until(rig.idle, PROMPTLY_S)
    assert answer.status == 504


async def test_stalled_stream_is_broken_off_within_the_configured_bound() -> None:
    async with rigged(decode=[always(stream_reply(gap_s=SLOW_S))], idle_timeout_s=0.2) as rig:
        with pytest.raises(aiohttp.ClientPayloadError):
            await asyncio.wait_for(rig.post(stream=True), 5.0)
        await until(rig.idle, PROMPTLY_S)


async def test_prefill_engine_whose_kv_never_comes_is_found_out_by_the_decode_engines_errors() -> None:
    def decode(seen: Seen) -> Reply:
        # what the second prefill engine sends never arrives
        return error_reply(500, "kv load failed") if seen.params["remote_engine_id"] == "p1" else good_decode(seen)

    async with rigged([good_prefill, good_prefill], [decode, decode]) as rig:
        statuses = [(await rig.post(prompt=f"{number} " * 30)).status for number in range(30)]
    assert set(statuses) == {200}, "the retry must avoid the prefill engine too"
    assert len(rig.prefills[1].seen) < 8, "the breaker must keep it out"


async def test_clients_own_request_id_comes_back_and_the_engines_get_the_transfer_id() -> None:
    async with rigged() as rig:
        answer = await rig.post(headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert rig.decode.seen[0].headers["x-request-id"] == answer.headers["x-kvpush-transfer-id"]
