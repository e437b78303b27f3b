"""Several routers that work as one, in this process: each has a port of its own, so a test chooses whom it asks."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from router.rig import Rig, Script, wait_ready
from router.stub import good_decode, good_prefill, running_stub

from kvpush.router.app import running
from kvpush.router.config import EngineSpec, RouterConfig, SelfCheckMode
from kvpush.router.others import Others, Question
from kvpush.router.place import Place, meeting_places
from kvpush.router.view import EngineView

KEY = "a-key"


@dataclass
class Worker(Rig):
    """One of them; `place` is where it meets the others."""

    place: Place

    async def own_engines(self) -> list[EngineView]:
        """The engines as this one alone knows them."""
        return await Others(self.place).ask(self.place.number, Question.ENGINES, list[EngineView])


@asynccontextmanager
async def team(
    workers: int = 2,
    decode: Sequence[Script] = (good_decode,),
    missing: int = 0,
    moves_tokens: int = 0,
    ready: bool = True,
    **settings: Any,
) -> AsyncIterator[list[Worker]]:
    """So many workers over the same stubs; the last `missing` of them never start."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running_stub(good_prefill))
        decodes = [
            await stack.enter_async_context(running_stub(script, moves_tokens=moves_tokens)) for script in decode
        ]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        found = []
        for place in stack.enter_context(meeting_places(workers))[: workers - missing]:
            config = RouterConfig(
                **{
                    "prefill": (EngineSpec(url=prefill.url),),
                    "decode": tuple(EngineSpec(url=stub.url) for stub in decodes),
                    "port": 0,
                    "poll_s": 0.05,
                    "drain_timeout_s": 0.2,
                    "self_check": SelfCheckMode.OFF,
                    "admin_key": KEY,
                    "place": place,
                    **settings,
                }
            )
            url = await stack.enter_async_context(running(config))
            found.append(Worker(url, [prefill], decodes, session, place))
        if ready and not missing:
            for one in found:
                await wait_ready(one)
        yield found


async def series(rig: Rig, name: str, **labels: str) -> float:
    """The sum of a page's series of this name with these labels among theirs."""
    page = (await rig.get("/metrics")).body.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"kvpush_router_{name}" and labels.items() <= sample.labels.items()
    )
