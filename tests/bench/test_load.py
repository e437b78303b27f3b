import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bench.stub import Script, serving

from kvpush.bench.client import Target
from kvpush.bench.load import Concurrency, Rate, offer
from kvpush.bench.workload import Prompt, poisson_arrivals

PROMPTS = [Prompt((4,), 3)] * 12


@contextmanager
def server(script: Script) -> Iterator[Target]:
    """The stub in a thread of its own, because `offer` has its own event loop."""
    ready, done = threading.Event(), asyncio.Event()
    found: list[Target] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(script) as target:
            found.append(target)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


def test_concurrency_is_reached_and_never_exceeded() -> None:
    script = Script(first_s=0.03)
    with server(script) as target:
        answers = offer(target, PROMPTS, Concurrency(4), "load", 1, lambda: None)
    assert [answer.request_id for answer in answers] == [f"load-{i}" for i in range(12)]
    assert not any(answer.error for answer in answers)
    assert script.most_in_flight == 4


def test_open_loop_sends_at_the_drawn_times_though_answers_are_slow() -> None:
    script = Script(first_s=0.3)
    done: list[None] = []
    with server(script) as target:
        answers = offer(target, PROMPTS, Rate(100.0, 0.5), "load", 7, lambda: done.append(None))
    sent = [answer.sent - answers[0].sent for answer in answers]
    late = [at - planned for at, planned in zip(sent, poisson_arrivals(12, 100.0, 7), strict=True)]
    assert all(-0.01 < delay < 0.2 for delay in late)
    assert script.most_in_flight == 12
    assert len(done) == 12
