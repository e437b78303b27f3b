"""The main path: two legs, one answer."""

import json
import re
from typing import Any

import pytest
from router.rig import Rig, rigged, until_true
from router.stub import error_reply, good_prefill, running_stub

from kvpush.router.config import Connector, EngineSpec

TRANSFER_ID = re.compile(r"[0-9a-f]{32}")


async def test_router_sends_both_legs_with_one_fresh_transfer_id() -> None:
    async with rigged() as rig:
        first, second = await rig.post(), await rig.post()
    assert first.status == second.status == 200
    legs = [(p.params, d.params) for p, d in zip(rig.prefill.seen, rig.decode.seen, strict=True)]
    ids = [params["transfer_id"] for pair in legs for params in pair]
    assert all(TRANSFER_ID.fullmatch(transfer_id) for transfer_id in ids)
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert first.headers["x-kvpush-transfer-id"] == ids[0]
    assert first.path == "pd"


async def test_router_names_the_prefill_engine_to_the_decode_leg() -> None:
    async with rigged() as rig:
        await rig.post()
    params = rig.decode.seen[0].params
    assert params["do_remote_prefill"] is True
    assert (params["remote_host"], params["remote_port"], params["remote_engine_id"]) == ("127.0.0.1", 7001, "p0")
    assert rig.prefill.seen[0].params["do_remote_decode"] is True


async def test_router_asks_the_prefill_leg_for_one_token_and_leaves_the_decode_leg_alone() -> None:
    asked: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.25,
        "max_tokens": 9,
    }
    async with rigged() as rig:
        await rig.post(**asked)
    prefill, decode = rig.prefill.seen[0].body, rig.decode.seen[0].body
    assert prefill["max_tokens"] == 1
    assert prefill["stream"] is False
    assert "stream_options" not in prefill
    assert {name: decode[name] for name in asked} == asked


async def test_router_relays_every_streamed_byte() -> None:
    async with rigged() as rig:
        answer = await rig.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], stream=True)
    texts = [line for line in answer.body.decode().split("\n\n") if line]
    assert [json.loads(line[6:])["choices"][0]["text"] for line in texts[:-1]] == ["t0", "t1", "t2"]
    assert texts[-1] == "data: [DONE]"
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("place", ["top", "xargs", "escaped"])
async def test_client_cannot_set_transfer_params(place: str) -> None:
    evil = {"remote_host": "169.254.169.254", "remote_port": 80}
    bodies = {
        "top": json.dumps({"prompt": "x", "kv_transfer_params": evil}),
        "xargs": json.dumps({"prompt": "x", "vllm_xargs": {"kv_transfer_params": "evil", "kept": 1}}),
        "escaped": '{"prompt": "x", "\\u006bv_transfer_params": {"remote_host": "169.254.169.254"}}',
    }
    async with rigged() as rig, rig.session.post(rig.url + "/v1/completions", data=bodies[place]) as response:
        assert response.status == 200
    for seen in rig.prefill.seen + rig.decode.seen:
        assert seen.params.get("remote_host") != "169.254.169.254"
        assert seen.body.get("vllm_xargs", {}) in ({}, {"kept": 1})


async def test_router_strips_transfer_params_on_routes_it_does_not_know() -> None:
    async with rigged() as rig:
        answer = await rig.post("/v1/responses", input="x", kv_transfer_params={"remote_host": "evil"})
    assert answer.status == 200
    assert answer.path == "local"
    assert rig.decode.seen[0].body == {"input": "x"}
    assert not rig.prefill.seen


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
async def test_router_refuses_encodings_in_which_it_would_miss_transfer_params(encoding: str) -> None:
    body = json.dumps({"input": "x", "kv_transfer_params": {"remote_host": "evil"}}).encode(encoding)
    async with rigged() as rig:
        for route in ("/v1/responses", "/v1/completions"):
            async with rig.session.post(rig.url + route, data=body) as response:
                assert response.status == 400
    assert not rig.decode.seen


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_decode_engines_error_reaches_the_client_as_it_is(status: int) -> None:
    async with rigged(decode=[lambda seen: error_reply(status, "from D")]) as rig:
        answer = await rig.post()
    assert answer.status == status
    assert answer.json["error"]["message"] == "from D"


async def test_router_answers_a_body_that_is_no_object_itself() -> None:
    async with rigged() as rig, rig.session.post(rig.url + "/v1/completions", data=b"[1, 2") as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]
    assert not rig.prefill.seen
    assert not rig.decode.seen


async def test_router_refuses_a_body_over_the_limit() -> None:
    async with rigged(max_body_bytes=1000) as rig:
        answer = await rig.post(prompt="x" * 2000)
    assert answer.status == 413


async def test_router_is_not_ready_while_the_prefill_engine_has_no_identity() -> None:
    async with rigged(ready=False) as rig:
        rig.prefill.engine_id = ""

        async def is_refused() -> bool:  # an earlier poll may have seen the name
            return (await rig.get("/health")).status == 503

        await until_true(is_refused)
        answer = await rig.post()
    assert answer.status == 503
    assert not rig.decode.seen


async def test_router_relays_the_models_of_a_decode_engine() -> None:
    async with rigged() as rig:
        answer = await rig.get("/v1/models")
    assert answer.status == 200
    assert rig.decode.seen[0].path == "/v1/models"


async def test_route_that_is_not_disaggregated_says_so_and_is_counted() -> None:
    body: dict[str, Any] = {"model": "m", "input": "hi", "max_output_tokens": 9}
    async with rigged() as rig:
        answer = await rig.post("/v1/responses", **body)
        page = (await rig.get("/metrics")).body.decode()
    assert (answer.status, answer.path) == (200, "local")
    assert (rig.decode.seen[0].path, rig.decode.seen[0].body) == ("/v1/responses", body)
    assert not rig.prefill.seen
    assert "kvpush_router_relayed_total 1.0" in page


async def test_metrics_count_requests_by_path() -> None:
    async with rigged() as rig:
        await rig.post()
        page = (await rig.get("/metrics")).body.decode()
    assert 'kvpush_router_requests_total{ending="complete",path="pd"} 1.0' in page


async def test_single_engine_gets_the_body_without_transfer_params() -> None:
    async with rigged(prefill=(), connector=Connector.NONE) as rig:
        answer = await rig.post()
    assert answer.path == "local"
    assert "kv_transfer_params" not in rig.decode.seen[0].body


async def test_vllm_push_legs_share_one_request_id() -> None:
    async with rigged(connector=Connector.VLLM_PUSH) as rig:
        await rig.post()
    prefill, decode = rig.prefill.seen[0], rig.decode.seen[0]
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
    assert prefill.params["do_remote_decode"] is True
    assert decode.params["remote_engine_id"] == "side"
    assert (decode.params["remote_port"], decode.params["tp_size"]) == (5600, 1)


async def test_vllm_pull_decodes_with_what_the_prefill_engine_answered() -> None:
    async with rigged(connector=Connector.VLLM_PULL) as rig:
        answer = await rig.post()
    assert answer.path == "pd"
    assert rig.decode.seen[0].params["remote_block_ids"] == [[1, 2]]


async def test_vllm_pull_keeps_many_prompts_on_one_engine() -> None:
    async with rigged(connector=Connector.VLLM_PULL) as rig:
        answer = await rig.post(prompt=["a", "b"])
    assert answer.path == "local"
    assert not rig.prefill.seen


async def test_engine_with_broken_tls_is_named_in_the_refusal_and_reached_by_nobody() -> None:
    async with running_stub(good_prefill) as plain:
        spec = EngineSpec(url=plain.url.replace("http:", "https:"))
        async with rigged(prefill=(), ready=False, prefill_specs=(spec,)) as rig:
            await until_true(lambda: refused_for(rig, "SSL"))
            answer = await rig.post()
    assert answer.status == 503
    assert spec.url in answer.json["error"]["message"]
    assert not rig.decode.seen


async def refused_for(rig: Rig, word: str) -> bool:
    return word in str((await rig.get("/health")).json["problems"])
