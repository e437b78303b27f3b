"""Clients that leave: both engines are told at once, whatever the request was at (cases B16, B18)."""

import asyncio
import random

import pytest
from router.rig import PROMPT, Rig, rigged
from router.stub import Reply, Seen, good_decode, json_reply, stream_reply, until

from kvpush.router.config import Connector

PROMPTLY_S = 2.0
SLOW_S = 30.0


def slow_prefill(seen: Seen) -> Reply:
    return json_reply({}, wait_s=SLOW_S if seen.body["prompt"] == PROMPT else 0.0)


def decode_after_prefill(seen: Seen) -> Reply:
    return stream_reply(wait_s=SLOW_S if seen.body["prompt"] == PROMPT else 0.0)


async def leave_after(rig: Rig, seconds: float, stream: bool = True) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.post(stream=stream), seconds)


async def test_short_request_is_not_held_up_by_ten_clients_that_left() -> None:
    async with rigged([slow_prefill], [decode_after_prefill]) as rig:
        await asyncio.gather(*(leave_after(rig, 0.3) for _ in range(10)))
        await until(rig.idle, PROMPTLY_S)
        assert (await rig.post(prompt="short", stream=True)).status == 200
    assert len(rig.prefill.aborted) == len(rig.decode.aborted) == 10


async def test_client_that_leaves_in_mid_stream_ends_the_decode_leg() -> None:
    async with rigged(decode=[lambda seen: stream_reply(1000, gap_s=0.01)]) as rig:
        await leave_after(rig, 0.2)
        await until(rig.idle, PROMPTLY_S)
    assert rig.decode.seen[0].aborted


@pytest.mark.parametrize("connector", [Connector.KVPUSH, Connector.VLLM_PULL])
async def test_client_that_leaves_when_the_prefill_leg_has_ended_ends_the_decode_leg(connector: Connector) -> None:
    async with rigged(decode=[lambda seen: stream_reply(wait_s=SLOW_S)], connector=connector) as rig:
        await leave_after(rig, 0.2)
        await until(rig.idle, PROMPTLY_S)
    assert rig.decode.seen[0].aborted


async def test_leaving_at_fifty_random_points_leaves_nothing_running_and_nothing_counted() -> None:
    rng = random.Random(5)

    def prefill(seen: Seen) -> Reply:
        return json_reply({}, wait_s=0.04)

    def decode(seen: Seen) -> Reply:
        if not seen.body.get("stream"):
            return good_decode(seen)
        return stream_reply(8, wait_s=0.04, gap_s=0.005)

    async def one(rig: Rig, seconds: float, stream: bool) -> None:
        try:
            await asyncio.wait_for(rig.post(stream=stream), seconds)
        except TimeoutError:
            return

    async with rigged([prefill, prefill], [decode, decode]) as rig:
        await asyncio.gather(*(one(rig, rng.uniform(0.0, 0.12), rng.random() < 0.8) for _ in range(50)))
        await until(rig.idle, 1.0)
        page = (await rig.get("/metrics")).body.decode()
        loads = [line for line in page.splitlines() if line.startswith("kvpush_router_engine_") and "up{" not in line]
        counted = [line for line in loads if "breaker" not in line and not line.endswith(" 0.0")]
        assert not counted
        assert (await rig.post()).status == 200
    assert any(seen.aborted for stub in rig.stubs for seen in stub.seen), "nobody left early enough to test anything"
