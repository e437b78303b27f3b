"""Several routers on one port are one to whoever looks at them or changes their fleet."""

import asyncio
from typing import Any

import pytest
from router.rig import Rig
from router.stub import Reply, Seen, error_reply, good_decode, running_stub, stream_reply, until
from router.team import KEY, series, team

from kvpush.router.breaker import FAULTS
from kvpush.router.config import SelfCheckMode

AUTH = {"Authorization": f"Bearer {KEY}"}


async def admin(rig: Rig, method: str, path: str, **body: str) -> tuple[int, Any]:
    async with rig.session.request(method, rig.url + path, headers=AUTH, json=body or None) as response:
        return response.status, await response.json()


async def test_page_of_any_worker_counts_the_requests_of_all() -> None:
    async with team(3) as rigs:
        for number, rig in enumerate(rigs):
            for _ in range(number + 1):
                assert (await rig.post()).status == 200
        for rig in rigs:
            assert await series(rig, "requests_total", path="pd", ending="complete") == 6
            assert await series(rig, "first_byte_seconds_count", path="pd") == 6
            assert await series(rig, "legs_total", role="decode") == 6
            assert await series(rig, "engine_up", role="decode") == 1
            assert await series(rig, "engine_breaker") == 2  # one state for each of two engines


async def test_page_of_any_worker_shows_what_all_have_in_flight() -> None:
    def slow(seen: Seen) -> Reply:
        return stream_reply(2, gap_s=30.0)

    async with team(decode=[slow]) as rigs:
        streams = [asyncio.create_task(rig.post(stream=True)) for rig in (*rigs, rigs[0])]
        await until(lambda: len(rigs[0].decode.live) == 3)
        for rig in rigs:
            assert await series(rig, "engine_requests", role="decode") == 3
            _, views = await admin(rig, "GET", "/admin/engines")
            assert [view["requests"] for view in views if view["role"] == "decode"] == [3]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_breaker_that_one_worker_has_opened_is_shown_by_all() -> None:
    def broken(seen: Seen) -> Reply:
        return error_reply(500)

    async with team(decode=[broken]) as rigs:
        for _ in range(FAULTS):
            await rigs[1].post()
        for rig in rigs:
            assert await series(rig, "engine_breaker", role="decode", state="open") == 1
            assert await series(rig, "engine_breaker", role="decode") == 1
            assert await series(rig, "failed_legs_total", role="decode", cause="refused") == FAULTS


async def test_page_without_a_worker_is_refused_and_names_it() -> None:
    async with team(3, missing=1) as rigs:
        for path in ("/metrics", "/health"):
            answer = await rigs[0].get(path)
            assert answer.status == 503
            assert b"worker 2 of this router does not answer" in answer.body


@pytest.mark.parametrize("asked", [0, 1])
async def test_engine_drained_at_one_worker_gets_nothing_new_from_any(asked: int) -> None:
    async with team(decode=[good_decode, good_decode]) as rigs:
        drained, other = rigs[0].decodes
        status, view = await admin(rigs[asked], "POST", "/drain", engine=drained.url)
        assert (status, view["duty"], view["takes_legs"]) == (200, "draining", False)
        for rig in rigs:
            for number in range(8):
                assert (await rig.post(prompt=f"{number} and more")).status == 200
        assert (len(drained.seen), len(other.seen)) == (0, 16)
        assert (await admin(rigs[1 - asked], "POST", "/admin/engines", role="decode", engine=drained.url))[0] == 200
        for rig in rigs:
            assert {one.duty for one in await rig.own_engines()} == {"on"}


@pytest.mark.parametrize("asked", [0, 1])
async def test_engine_added_and_removed_at_one_worker_is_known_and_forgotten_by_all(asked: int) -> None:
    async with team(3) as rigs, running_stub(good_decode) as extra:
        old = rigs[0].decode
        assert (await admin(rigs[asked], "POST", "/admin/engines", role="decode", engine=extra.url))[0] == 200
        assert (await admin(rigs[asked], "DELETE", "/admin/engines", engine=old.url))[0] == 200
        for rig in rigs:
            assert await series(rig, "engine_breaker", engine=old.url) == 0
        await asyncio.gather(*(takes_legs(rig, extra.url) for rig in rigs))
        for rig in rigs:
            assert (await rig.post()).status == 200
        assert (len(extra.seen), len(old.seen)) == (3, 0)


async def takes_legs(rig: Rig, url: str) -> None:
    async with asyncio.timeout(5.0):
        while not any(one["takes_legs"] for one in (await admin(rig, "GET", "/admin/engines"))[1] if one["url"] == url):
            pass


async def test_change_that_no_worker_can_make_is_refused_with_the_reason() -> None:
    async with team() as rigs:
        for rig in rigs:
            for method, path in (("POST", "/drain"), ("DELETE", "/admin/engines")):
                status, answer = await admin(rig, method, path, engine="http://other:1")
                assert status == 400
                assert "not known" in str(answer)
            status, _ = await admin(rig, "POST", "/admin/engines", role="prefill", engine=rig.decode.url)
            assert status == 400


async def test_change_that_a_worker_may_not_have_made_is_no_success_and_can_be_asked_for_again() -> None:
    async with team(3, missing=1) as rigs:
        for rig in rigs:
            for _ in range(2):
                status, answer = await admin(rig, "POST", "/drain", engine=rig.decode.url)
                assert status == 503
                assert "worker 2 of this router does not answer" in str(answer)


async def test_changes_that_cross_leave_all_workers_alike() -> None:
    async with team(3) as rigs, running_stub(good_decode) as extra:

        async def change(number: int) -> None:
            rig = rigs[number % 3]
            if number % 2:
                await admin(rig, "POST", "/admin/engines", role="decode", engine=extra.url)
            else:
                await admin(rig, "DELETE", "/admin/engines", engine=extra.url)

        for _ in range(10):
            await asyncio.gather(*(change(number) for number in range(12)))
            known = [[one.url for one in await rig.own_engines()] for rig in rigs]
            assert known[0] == known[1] == known[2]


async def test_one_worker_checks_the_pairs_for_all() -> None:
    async with team(3, self_check=SelfCheckMode.ON, moves_tokens=48) as rigs:
        assert len(rigs[0].decode.seen) == 1


async def test_no_worker_is_ready_before_that_check_has_passed() -> None:
    async with team(self_check=SelfCheckMode.ON, moves_tokens=0, ready=False) as rigs:
        await until(lambda: len(rigs[0].decode.seen) == 1)
        for rig in rigs:
            health = await rig.get("/health")
            assert health.status == 503
            assert "self-check" in str(health.json["problems"])
