"""Engines that come, go, restart and drain while the router runs."""

import asyncio
import json
from pathlib import Path

import pytest
from router.rig import Rig, rigged, until_true, wait_ready
from router.stub import Reply, Seen, good_decode, running_stub, stream_reply, until

from kvpush.core.errors import ConfigError
from kvpush.router.config import EngineRole
from kvpush.router.enginefile import read_engines

KEY = "a-key"
AUTH = {"Authorization": f"Bearer {KEY}"}


async def admin(rig: Rig, method: str, path: str, **body: str) -> tuple[int, object]:
    async with rig.session.request(method, rig.url + path, headers=AUTH, json=body or None) as response:
        return response.status, await response.json()


async def test_admin_routes_need_their_key_and_are_off_without_one() -> None:
    async with rigged() as rig:
        assert (await rig.get("/admin/engines")).status == 403
    async with rigged(admin_key=KEY) as rig:
        assert (await rig.get("/admin/engines")).status == 401
        assert (await admin(rig, "GET", "/admin/engines"))[0] == 200


async def test_engine_added_at_run_time_gets_legs_and_a_removed_one_gets_no_more() -> None:
    async with rigged(admin_key=KEY) as rig, running_stub(good_decode) as extra:
        status, _ = await admin(rig, "POST", "/admin/engines", role="decode", engine=extra.url)
        assert status == 200
        while not extra.seen:
            await rig.post()
        assert (await admin(rig, "DELETE", "/admin/engines", engine=rig.decode.url))[0] == 200
        before = len(rig.decode.seen)
        for _ in range(4):
            assert (await rig.post()).status == 200
        assert len(rig.decode.seen) == before


async def test_drained_engine_finishes_what_it_has_and_gets_nothing_new() -> None:
    def decode(seen: Seen) -> Reply:
        return stream_reply(20, gap_s=0.02)

    async with rigged(decode=[decode, good_decode], admin_key=KEY) as rig:
        streams = [asyncio.create_task(rig.post(stream=True)) for _ in range(4)]
        await until(lambda: len(rig.decode.live) > 0)
        assert (await admin(rig, "POST", "/drain", engine=rig.decode.url))[0] == 200
        had = len(rig.decode.seen)
        for _ in range(6):
            assert (await rig.post()).status == 200
        answers = await asyncio.gather(*streams)
    assert len(rig.decode.seen) == had
    assert all(b"[DONE]" in answer.body for answer in answers)


async def test_last_drained_engine_makes_the_router_unready() -> None:
    async with rigged(admin_key=KEY) as rig:
        await admin(rig, "POST", "/drain", engine=rig.prefill.url)
        health = await rig.get("/health")
        assert (health.status, (await rig.post()).status) == (503, 503)
        assert "draining" in str(health.json)
        await admin(rig, "POST", "/admin/engines", role="prefill", engine=rig.prefill.url)
        await wait_ready(rig)


async def test_nonsense_is_a_400_that_names_it() -> None:
    async with rigged(admin_key=KEY) as rig:
        for body in ({"role": "decode", "engine": "nowhere"}, {"role": "boss", "engine": "http://x:1"}):
            assert (await admin(rig, "POST", "/admin/engines", **body))[0] == 400
        status, answer = await admin(rig, "POST", "/drain", engine="http://other:1")
        assert status == 400
        assert "not known" in str(answer)


async def test_restarted_prefill_engine_is_known_by_its_new_id_within_a_second() -> None:
    async with rigged() as rig:
        rig.prefill.engine_id = "reborn"

        async def is_known() -> bool:
            await rig.post()
            return bool(rig.decode.seen[-1].params["remote_engine_id"] == "reborn")

        await until_true(is_known, within_s=1.0)


async def test_engine_that_dies_is_taken_out_and_put_back_when_it_returns() -> None:
    async with rigged(admin_key=KEY) as rig:
        async with running_stub(good_decode) as extra:
            port = int(extra.url.rpartition(":")[2])
            await admin(rig, "POST", "/admin/engines", role="decode", engine=extra.url)
            while not extra.seen:
                await rig.post()
        statuses = {(await rig.post()).status for _ in range(10)}
        assert statuses == {200}
        async with running_stub(good_decode, port=port) as back, asyncio.timeout(5.0):
            while not back.seen:
                await rig.post()


async def test_engines_follow_the_file_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    async with running_stub(good_decode) as one, running_stub(good_decode) as two:
        path.write_text(json.dumps({"decode": [one.url]}))
        async with rigged(decode=(), engines_file=str(path)) as rig:
            await rig.post()
            path.write_text(json.dumps({"decode": [one.url, two.url]}))
            async with asyncio.timeout(5.0):
                while not two.seen:
                    await rig.post()
            path.write_text("{ not json")
            assert (await rig.post()).status == 200
            path.write_text(json.dumps({"decode": [two.url]}))

            async def is_forgotten() -> bool:
                return one.url not in str((await rig.get("/metrics")).body)

            await until_true(is_forgotten)
            assert (await rig.post()).status == 200


async def test_router_does_not_start_with_an_engine_file_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    with pytest.raises(ConfigError, match=f"{path} cannot be read: No such file"):
        async with rigged(decode=(), engines_file=str(path)):
            pass


def test_engine_file_is_read_by_role(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_text('{"prefill": ["http://p:1"], "decode": ["http://d:1"]}')
    assert {spec.url: role for spec, role in read_engines(path).items()} == {
        "http://p:1": EngineRole.PREFILL,
        "http://d:1": EngineRole.DECODE,
    }


@pytest.mark.parametrize("bad", ["", "[]", '{"decode": ["x"]}', '{"decoder": []}'])
def test_bad_engine_file_is_refused_with_a_remedy(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "engines.json"
    path.write_text(bad)
    with pytest.raises(ConfigError) as refused:
        read_engines(path)
    assert refused.value.remedy
