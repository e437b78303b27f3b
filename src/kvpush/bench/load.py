"""Offering a workload to one URL: open loop (arrivals do not wait for answers) or a fixed concurrency."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from kvpush.bench.client import Answer, Target, complete
from kvpush.bench.workload import Prompt, poisson_arrivals


@dataclass(frozen=True)
class Concurrency:
    """As many requests in flight as this, each answered one followed by the next."""

    requests: int

    def __str__(self) -> str:
        return f"concurrency {self.requests}"


@dataclass(frozen=True)
class Rate:
    """Poisson arrivals, `per_s` requests per second; `share` of the measured saturation."""

    per_s: float
    share: float

    def __str__(self) -> str:
        return f"rate {self.share:.2f}"


Load = Concurrency | Rate


def offer(
    target: Target, prompts: Sequence[Prompt], load: Load, name: str, seed: int, answered: Callable[[], None]
) -> list[Answer]:
    """Send all prompts and return their answers in order. `name` begins every request id."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_offer(target, prompts, load, name, seed, answered))


async def _offer(
    target: Target, prompts: Sequence[Prompt], load: Load, name: str, seed: int, answered: Callable[[], None]
) -> list[Answer]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send(i: int) -> Answer:
            answer = await complete(session, target, prompts[i], f"{name}-{i}")
            answered()
            return answer

        match load:
            case Concurrency(requests):
                gate = asyncio.Semaphore(requests)

                async def send_in_turn(i: int) -> Answer:
                    async with gate:
                        return await send(i)

                return await asyncio.gather(*(send_in_turn(i) for i in range(len(prompts))))
            case Rate(per_s):
                return await _open_loop(poisson_arrivals(len(prompts), per_s, seed), send)


async def _open_loop(
    arrivals: Sequence[float], send: Callable[[int], "asyncio._CoroutineLike[Answer]"]
) -> list[Answer]:
    start = time.monotonic()
    tasks = []
    for i, at in enumerate(arrivals):
        await asyncio.sleep(max(0.0, start + at - time.monotonic()))
        tasks.append(asyncio.create_task(send(i)))
    return await asyncio.gather(*tasks)
