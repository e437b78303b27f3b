"""A router between stub engines, and a client: what nearly every router test starts with."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from router.stub import POLL_S, Reply, Seen, Stub, good_decode, good_prefill, running_stub

from kvpush.core.ids import Address, EngineId
from kvpush.router.app import running
from kvpush.router.config import Connector, EngineSpec, RouterConfig, SelfCheckMode

Script = Callable[[Seen], Reply]
PROMPT = "word " * 40


@dataclass
class Answered:
    """A whole answer as the client saw it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.body)
        return content

    @property
    def path(self) -> str:
        return self.headers.get("x-kvpush-path", "")


@dataclass
class Rig:
    """The parts of a running set-up."""

    url: str
    prefills: list[Stub]
    decodes: list[Stub]
    session: aiohttp.ClientSession

    @property
    def prefill(self) -> Stub:
        return self.prefills[0]

    @property
    def decode(self) -> Stub:
        return self.decodes[0]

    @property
    def stubs(self) -> list[Stub]:
        return self.prefills + self.decodes

    async def post(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields: Any
    ) -> Answered:
        if path == "/v1/completions":
            fields = {"model": "m", "prompt": PROMPT, "max_tokens": 3} | fields
        async with self.session.post(self.url + path, json=fields, headers=headers) as response:
            return Answered(response.status, _lower(response), await response.read())

    async def get(self, path: str) -> Answered:
        async with self.session.get(self.url + path) as response:
            return Answered(response.status, _lower(response), await response.read())

    async def is_ready(self) -> bool:
        return (await self.get("/health")).status == 200

    def idle(self) -> bool:
        """No engine is working on anything."""
        return not any(stub.live for stub in self.stubs)

    def live_ids(self) -> list[tuple[str, str]]:
        """(stub, transfer id) of every leg an engine is working on."""
        return [(stub.url, seen.params["transfer_id"]) for stub in self.stubs for seen in stub.live]


def _lower(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


@asynccontextmanager
async def rigged(
    prefill: Sequence[Script] = (good_prefill,),
    decode: Sequence[Script] = (good_decode,),
    ready: bool = True,
    prefill_specs: Sequence[EngineSpec] = (),
    decode_metrics_status: int = 200,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Stubs with these scripts, a router over them, ready to serve."""
    async with AsyncExitStack() as stack:
        prefills = [
            await stack.enter_async_context(running_stub(script, engine_id=f"p{number}", control_port=7001 + number))
            for number, script in enumerate(prefill)
        ]
        decodes = [
            await stack.enter_async_context(running_stub(script, engine_id=f"d{number}", control_port=7101 + number))
            for number, script in enumerate(decode)
        ]
        for stub in decodes:
            stub.metrics_status = decode_metrics_status
        config = RouterConfig(
            **{
                "prefill": (*prefill_specs, *(spec_of(stub, settings.get("connector")) for stub in prefills)),
                "decode": tuple(EngineSpec(url=stub.url) for stub in decodes),
                "port": 0,
                "poll_s": 0.05,
                "drain_timeout_s": 0.2,
                "self_check": SelfCheckMode.OFF,
                **settings,
            }
        )
        url = await stack.enter_async_context(running(config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        rig = Rig(url, prefills, decodes, session)
        if ready:
            await wait_ready(rig)
        yield rig


def spec_of(stub: Stub, connector: Connector | None) -> EngineSpec:
    if connector is not Connector.VLLM_PUSH:
        return EngineSpec(url=stub.url)
    return EngineSpec(url=stub.url, control=Address("127.0.0.1", 5600), engine_id=EngineId("side"))


async def until_true(check: Callable[[], Awaitable[bool]], within_s: float = 5.0) -> None:
    """Ask again and again. Raises `TimeoutError` when the answer stays no."""
    async with asyncio.timeout(within_s):
        while not await check():  # noqa: ASYNC110 - any condition can be waited for
            await asyncio.sleep(POLL_S)


async def wait_ready(rig: Rig) -> None:
    await until_true(rig.is_ready, 10.0)
