"""Several processes on one port, as real processes."""

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest
from router.rig import until_true
from router.stub import Stub, good_decode, good_prefill, running_stub

from kvpush.core.errors import ConfigError
from kvpush.router.config import RouterConfig, parse_engine
from kvpush.router.workers import reserve, run_workers


def free_port() -> int:
    config = RouterConfig(prefill=(parse_engine("p:1"),), decode=(parse_engine("d:1"),), port=0)
    with reserve(config) as reserved:
        return int(reserved.getsockname()[1])


@asynccontextmanager
async def routers(prefill: Stub, decode: Stub, port: int, workers: int) -> AsyncIterator[Process]:
    argv = [sys.executable, "-m", "kvpush.cli", "router", "--prefill", prefill.url, "--decode", decode.url]
    argv += ["--port", str(port), "--workers", str(workers), "--self-check", "off"]
    process = await asyncio.create_subprocess_exec(*argv, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), 20.0)


async def test_router_ends_with_the_reason_when_a_worker_is_killed() -> None:
    async with (
        running_stub(good_prefill) as prefill,
        running_stub(good_decode) as decode,
        routers(prefill, decode, free_port(), workers=2) as process,
    ):

        def workers() -> list[psutil.Process]:
            children = psutil.Process(process.pid).children()
            return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

        async def both_run() -> bool:
            return len(workers()) == 2

        await until_true(both_run, 60.0)
        workers()[-1].kill()
        _, said = await asyncio.wait_for(process.communicate(), 20.0)
    assert process.returncode == 1
    assert b"ended with status -9; the other workers are stopped" in said
    assert b"Traceback" not in said


def test_workers_do_not_start_with_an_engine_file_that_is_missing() -> None:
    config = RouterConfig(decode=(), engines_file="/missing/engines.json", workers=2)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        run_workers(config, logging.INFO)


async def test_workers_share_one_port_and_end_together() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with running_stub(good_prefill) as prefill, running_stub(good_decode) as decode:
        async with routers(prefill, decode, port, workers=2) as process:

            async def answers() -> bool:
                # a connection of its own each time, so that both workers get some
                async with aiohttp.ClientSession() as session:
                    try:
                        async with session.post(url + "/v1/completions", json={"prompt": "x"}) as response:
                            return response.status == 200
                    except aiohttp.ClientConnectionError:
                        return False

            await until_true(answers, 60.0)
            for _ in range(20):
                await until_true(answers, 60.0)
        assert process.returncode == 0
    assert len({seen.params["transfer_id"] for seen in decode.seen}) == len(decode.seen)


async def test_next_turn_finds_the_one_before_whichever_worker_has_served_it() -> None:
    turns = 24
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    said = [{"role": "user", "content": "hello"}]
    async with (
        running_stub(good_prefill) as prefill,
        running_stub(good_decode) as decode,
        routers(prefill, decode, port, workers=2),
    ):

        async def is_answered() -> bool:
            async with aiohttp.ClientSession() as session:
                try:
                    async with session.post(url, json={"model": "m", "messages": said}) as response:
                        return response.status == 200
                except aiohttp.ClientConnectionError:
                    return False

        async def are_both_ready() -> bool:
            return all([await is_answered() for _ in range(8)])

        await until_true(are_both_ready, 60.0)
        before = len(decode.seen)
        for _ in range(turns):
            said += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
            assert await is_answered()
        found = [seen.params.get("reuse", {}).get("transfer_id") for seen in prefill.seen[before:]]
        kept = [seen.params["keep"]["transfer_id"] for seen in decode.seen[before - 1 : -1]]
    assert found == kept
