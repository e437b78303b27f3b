"""Load on real connections: unequal engines, missing load metrics, bounded promises (cases B56, B59)."""

import asyncio
import logging
from collections import Counter

import pytest
from router.rig import PROMPT, Rig, rigged, wait_ready
from router.stub import Reply, Seen, good_prefill, json_reply, stream_reply, until

REQUESTS = 300
RATE_PER_S = 100.0
FAST_S, SLOW_S = 0.06, 0.6


def decode_in(seconds: float) -> Reply:
    return json_reply({"choices": []}, wait_s=seconds)


async def fixed_rate(rig: Rig) -> None:
    """Send at a fixed rate, whatever comes back."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    sent = []
    for number in range(REQUESTS):
        await asyncio.sleep(start + number / RATE_PER_S - loop.time())
        sent.append(asyncio.create_task(rig.post(prompt=f"{number} {PROMPT}")))
    answers = await asyncio.gather(*sent)
    assert {answer.status for answer in answers} == {200}


async def test_engine_that_is_ten_times_slower_gets_under_15_percent() -> None:
    def slow(seen: Seen) -> Reply:
        return decode_in(SLOW_S)

    def fast(seen: Seen) -> Reply:
        return decode_in(FAST_S)

    async with rigged(decode=[slow, fast, fast, fast]) as rig:
        await fixed_rate(rig)
        shares = Counter({stub.url: len(stub.seen) for stub in rig.decodes})
    assert shares[rig.decodes[0].url] < 0.15 * REQUESTS


async def test_missing_load_metrics_are_reported_and_the_routers_own_counts_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decode(seen: Seen) -> Reply:
        return decode_in(0.2)

    caplog.set_level(logging.WARNING)
    async with rigged(decode=[decode, decode], ready=False, decode_metrics_status=404) as rig:
        await until(lambda: sum("no /metrics" in line for line in caplog.messages) == 2)
        await wait_ready(rig)
        await asyncio.gather(*(rig.post(prompt=f"{number} {PROMPT}") for number in range(10)))
    assert [len(stub.seen) for stub in rig.decodes] == [5, 5]


async def test_promised_but_unwritten_blocks_are_bounded_and_the_rest_waits_in_the_router() -> None:
    most_waiting = 0

    def prefill(seen: Seen) -> Reply:
        return json_reply({"choices": []}, wait_s=0.05)

    def decode(seen: Seen) -> Reply:
        nonlocal most_waiting
        most_waiting = max(most_waiting, len(rigs[0].decode.live))
        return stream_reply(wait_s=0.05)

    rigs: list[Rig] = []
    tokens = 1000
    # the stub's pool holds 16,000 tokens: a quarter of it is room for four of these prompts
    async with rigged([prefill], [decode], unwritten_fraction=0.25) as rig:
        rigs.append(rig)
        answers = await asyncio.gather(*(rig.post(prompt=[number] * tokens, stream=True) for number in range(16)))
    assert {answer.status for answer in answers} == {200}
    assert most_waiting == 4


async def test_prompt_larger_than_the_bound_is_still_served() -> None:
    async with rigged(unwritten_fraction=0.01) as rig:
        assert (await rig.post(prompt=[1] * 5000)).status == 200


async def test_request_that_waits_too_long_for_room_is_refused() -> None:
    async with rigged(
        [good_prefill], [lambda seen: stream_reply(wait_s=30.0)], unwritten_fraction=0.01, queue_timeout_s=0.1
    ) as rig:
        first = asyncio.create_task(rig.post(stream=True))
        await until(lambda: len(rig.decode.live) == 1)
        answer = await rig.post(prompt=[1] * 1000)
        first.cancel()
    assert answer.status == 503
    assert "room" in answer.json["error"]["message"]


async def test_queue_in_the_router_is_bounded() -> None:
    async with rigged(
        [good_prefill], [lambda seen: stream_reply(wait_s=30.0)], unwritten_fraction=0.01, max_waiting=1
    ) as rig:
        tasks = [asyncio.create_task(rig.post(prompt=[1] * 1000, stream=True)) for _ in range(2)]
        await until(lambda: len(rig.decode.live) == 1)
        answer = await rig.post(prompt=[1] * 1000)
        for task in tasks:
            task.cancel()
    assert answer.status == 503


async def test_late_decode_starts_the_prefill_leg_while_the_decode_engine_has_no_room() -> None:
    async with rigged(
        [good_prefill], [lambda seen: stream_reply(wait_s=0.5)], unwritten_fraction=0.01, late_decode=True
    ) as rig:
        first = asyncio.create_task(rig.post(prompt=[1] * 1000, stream=True))
        await until(lambda: len(rig.decode.live) == 1)
        second = asyncio.create_task(rig.post(prompt=[2] * 1000, stream=True))
        await until(lambda: len(rig.prefill.seen) == 2)
        assert len(rig.decode.seen) == 1
        assert [(await first).status, (await second).status] == [200, 200]


async def test_late_decode_holds_the_decode_leg_until_the_prompt_is_nearly_done() -> None:
    registered_before_done: list[bool] = []

    def prefill(seen: Seen) -> Reply:
        return json_reply({"choices": []}, wait_s=0.5)

    def decode(seen: Seen) -> Reply:
        registered_before_done.append(bool(rigs[0].prefill.live))
        return stream_reply(wait_s=1.0)

    rigs: list[Rig] = []
    async with rigged([prefill], [decode], late_decode=True, late_decode_lead_s=0.2) as rig:
        rigs.append(rig)
        await rig.post(prompt=[1] * 1000, stream=True)
        await until(rig.idle)
        sent = asyncio.create_task(rig.post(prompt=[2] * 1000, stream=True))
        await until(lambda: len(rig.prefill.live) == 1)
        assert len(rig.decode.seen) == 1, "the decode leg did not wait, though the prompt takes half a second"
        await sent
    assert registered_before_done[1]
