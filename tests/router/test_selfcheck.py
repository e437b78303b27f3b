"""Never silently decode-only: the router is not ready before KV has been seen to move (case B57)."""

import logging

import pytest
from router.rig import Rig, rigged, wait_ready
from router.stub import Reply, Seen, error_reply, until

from kvpush.router.config import Connector, SelfCheckMode


async def problems_of(rig: Rig) -> str:
    return str((await rig.get("/health")).json["problems"])


async def test_router_is_ready_once_every_pair_has_moved_tokens() -> None:
    async with rigged(self_check=SelfCheckMode.ON, ready=False) as rig:
        rig.decode.moves_tokens = 16
        await wait_ready(rig)
    assert rig.prefill.seen[0].params["transfer_id"] == rig.decode.seen[0].params["transfer_id"]


async def test_router_is_not_ready_while_texts_are_right_but_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpush.router.selfcheck.COUNT_TIMEOUT_S", 0.3)
    monkeypatch.setattr("kvpush.router.selfcheck.RETRY_S", 0.05)
    async with rigged(self_check=SelfCheckMode.ON, ready=False) as rig:
        await until(lambda: len(rig.decode.seen) >= 2)
        health = await rig.get("/health")
        assert health.status == 503
        assert "no KV moved" in await problems_of(rig)
        rig.decode.moves_tokens = 16
        await wait_ready(rig)


@pytest.mark.parametrize("connector", [Connector.VLLM_PUSH, Connector.VLLM_PULL])
async def test_self_check_works_for_vllms_own_connectors(connector: Connector) -> None:
    async with rigged(self_check=SelfCheckMode.ON, connector=connector, ready=False) as rig:
        rig.decode.moves_tokens = 16
        await wait_ready(rig)


async def test_failing_pair_is_named_with_the_engines_own_words(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpush.router.selfcheck.COUNT_TIMEOUT_S", 0.3)
    caplog.set_level(logging.ERROR)

    def refuse(seen: Seen) -> Reply:
        return error_reply(500, "wrong role")

    async with rigged([refuse], self_check=SelfCheckMode.ON, ready=False) as rig:
        await until(lambda: any("self-check" in line for line in caplog.messages))
        assert "wrong role" in await problems_of(rig)
        assert "The log of the decode engine" in await problems_of(rig)
        assert rig.prefill.url in await problems_of(rig)


async def test_router_without_a_connector_needs_no_check() -> None:
    async with rigged(prefill=(), connector=Connector.NONE, self_check=SelfCheckMode.ON) as rig:
        assert (await rig.post()).status == 200
