"""Events are passed on whole, and time-outs of loops fire when nothing happens."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush.router.idle import IdleTimeout
from kvpush.router.relay import cut_after_event


@given(st.lists(st.sampled_from([b"data: x", b"\n", b"\n\n", b"data: [DONE]\n\n"]), max_size=20))
def test_nothing_is_lost_and_what_is_sent_ends_with_an_event(chunks: list[bytes]) -> None:
    held, sent = b"", []
    for chunk in chunks:
        whole, held = cut_after_event(held + chunk)
        sent.append(whole)
    assert b"".join(sent) + held == b"".join(chunks)
    assert all(part.endswith(b"\n\n") for part in sent if part)


def test_absurdly_long_event_is_not_held_for_ever() -> None:
    data = b"x" * (2 * 1024 * 1024)
    assert cut_after_event(data) == (data, b"")


async def test_block_that_goes_on_is_left_alone() -> None:
    with IdleTimeout(0.05) as patience:
        for _ in range(10):
            patience.allow(0.5)
            await asyncio.sleep(0.02)


async def test_block_in_which_nothing_happens_times_out() -> None:
    async def wait() -> None:
        with IdleTimeout(0.02) as patience:
            patience.allow(0.05)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await wait()


async def test_cancellation_from_outside_stays_a_cancellation() -> None:
    async def wait() -> None:
        with IdleTimeout(10.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
