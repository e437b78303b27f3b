"""Several processes on one port, as real processes."""

import asyncio
import logging
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

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
async def routers(prefill: Stub, decode: Stub, port: int, workers: int, *more: str) -> AsyncIterator[Process]:
    argv = [sys.executable, "-m", "kvpush.cli", "router", "--prefill", prefill.url, "--decode", decode.url]
    argv += ["--port", str(port), "--workers", str(workers), "--self-check", "off", *more]
    process = await asyncio.create_subprocess_exec(*argv, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), 20.0)


def workers_of(process: Process) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


async def fresh(method: str, url: str, patience_s: float = 10.0, **settings: Any) -> tuple[int, str]:
    """Ask on a connection of its own, so that the kernel chooses a worker anew; (0, "") when there is no answer."""
    timeout = aiohttp.ClientTimeout(total=patience_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, **settings) as response,
        ):
            return response.status, await response.text()
    except (aiohttp.ClientConnectionError, TimeoutError):
        return 0, ""


async def ready(url: str) -> None:
    async def is_ready() -> bool:
        return (await fresh("GET", url + "/health"))[0] == 200

    await until_true(is_ready, 60.0)


async def test_router_ends_with_the_reason_when_a_worker_is_killed() -> None:
    async with (
        running_stub(good_prefill) as prefill,
        running_stub(good_decode) as decode,
        routers(prefill, decode, free_port(), workers=2) as process,
    ):

        async def both_run() -> bool:
            return len(workers_of(process)) == 2

        await until_true(both_run, 60.0)
        workers_of(process)[-1].kill()
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


LOOKS = 16  # so many connections reach both of two workers, but for one run in 32,768


async def test_page_counts_every_request_whichever_worker_is_asked() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    async with (
        running_stub(good_prefill) as prefill,
        running_stub(good_decode) as decode,
        routers(prefill, decode, port, 2),
    ):
        await ready(url)
        for _ in range(LOOKS):
            status, _ = await fresh("POST", url + "/v1/completions", json={"prompt": "x"})
            assert status == 200
        for _ in range(LOOKS):
            status, page = await fresh("GET", url + "/metrics")
            assert status == 200
            assert f'kvpush_router_requests_total{{ending="complete",path="pd"}} {LOOKS}.0' in page
            assert f'kvpush_router_legs_total{{engine="{decode.url}",role="decode"}} {LOOKS}.0' in page
            assert f'kvpush_router_engine_up{{engine="{decode.url}",role="decode"}} 1.0' in page


async def test_engine_drained_over_http_gets_nothing_new_from_any_worker() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    key = {"Authorization": "Bearer a-key"}
    async with (
        running_stub(good_prefill) as prefill,
        running_stub(good_decode) as decode,
        running_stub(good_decode) as extra,
        routers(prefill, decode, port, 2, "--decode", extra.url, "--admin-key", "a-key"),
    ):
        await ready(url)
        status, _ = await fresh("POST", url + "/drain", headers=key, json={"engine": extra.url})
        assert status == 200
        for _ in range(LOOKS):
            assert (await fresh("POST", url + "/v1/completions", json={"prompt": "x"}))[0] == 200
        assert (len(decode.seen), len(extra.seen)) == (LOOKS, 0)


async def test_router_with_a_stuck_worker_is_not_ready_and_says_which() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    async with (
        running_stub(good_prefill) as prefill,
        running_stub(good_decode) as decode,
        routers(prefill, decode, port, 2) as process,
    ):
        await ready(url)
        stuck = workers_of(process)[0]
        stuck.suspend()
        try:
            said = ""

            async def is_said() -> bool:
                # a connection that the kernel gives to the stuck worker is not answered at all
                nonlocal said
                status, said = await fresh("GET", url + "/health", patience_s=4.0)
                return status == 503

            await until_true(is_said, 60.0)
            assert re.search(r"worker \d of this router does not answer: nothing within 2 s", said)
        finally:
            stuck.resume()
        await ready(url)
