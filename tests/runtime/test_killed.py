"""Peers that are killed and started again at the same address, again and again: the other one stays what it is."""

import time
from collections.abc import Callable, Iterator
from itertools import count

import psutil
import pytest
from runtime.pair import RemoteSide, answer, close_all
from runtime.rig import until
from runtime.side import BRISK, announce, answers, final, new_key, receive

from kvpush.core.events import BlocksSafe, Outcome, ReceiveEnded
from kvpush.core.ids import Address, Key
from kvpush.core.layout import Span

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = pytest.mark.timeout(600)

ROUNDS = [pytest.param(4, id="four times"), pytest.param(40, id="forty times", marks=pytest.mark.long)]
SPAN = Span(0, 10)
HERE, THERE, LOST = (3, 1, 4), (5, 9, 2), (6, 7, 8)
RECOVERY_S = 5.0
Make = Callable[..., RemoteSide]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RemoteSide] = []

    def make(name: str, listen: Address | None = None) -> RemoteSide:
        made.append(RemoteSide(name, listen, ucx_tls="tcp"))
        return made[-1]

    yield make
    close_all(made)


def push_until_delivered(sender: RemoteSide, receiver: RemoteSide, seed: int) -> float:
    """Ask until a push is delivered, and check its bytes; returns how long that took, in seconds."""
    began = time.monotonic()
    sender.fill(seed)
    for _ in count():
        key = new_key()
        receiver.submit(receive(key, sender.address, SPAN.end, THERE))
        sender.submit(final(key, SPAN.end, HERE))
        ended = answer(receiver, key)
        assert isinstance(ended, ReceiveEnded)
        if ended.outcome is Outcome.DELIVERED:
            break
        assert time.monotonic() < began + 2 * RECOVERY_S, ended
    took_s = time.monotonic() - began
    assert receiver.tokens(SPAN, THERE) == sender.tokens(SPAN, HERE)
    return took_s


def begin(sender: RemoteSide, receiver: RemoteSide, number: int) -> Key:
    """A transfer that is somewhere in its life when this returns."""
    key = new_key()
    receiver.submit(receive(key, sender.address, SPAN.end, LOST))
    sender.submit(announce(key) if number % 2 else final(key, SPAN.end, HERE))
    return key


def size_of(side: RemoteSide) -> tuple[int, int]:
    """File descriptors and threads."""
    process = psutil.Process(side.pid)
    return process.num_fds(), process.num_threads()


def assert_all_is_over(receiver: RemoteSide, keys: list[Key]) -> None:
    """Each request has had its end, and its blocks are out of reach."""
    for key in keys:
        (ended,) = until(lambda key=key: answers(receiver.drain(), key))  # type: ignore[misc]
        if isinstance(ended, ReceiveEnded) and ended.quarantined:
            within_s = BRISK.lease_s + BRISK.quarantine_s + 5.0
            until(lambda key=key: is_safe(receiver, key), within_s)  # type: ignore[misc]


def is_safe(receiver: RemoteSide, key: Key) -> bool:
    return any(isinstance(event, BlocksSafe) and event.key == key for event in receiver.drain())


@pytest.mark.parametrize("rounds", ROUNDS)
def test_receiver_serves_with_every_successor_of_a_killed_sender(make: Make, rounds: int) -> None:
    sender, receiver = make("prefill"), make("decode")
    push_until_delivered(sender, receiver, 0)
    keys, sizes, took = [], [], []
    for number in range(rounds):
        keys.append(begin(sender, receiver, number))
        sender.kill()
        sender = make("prefill", sender.address)
        assert sender.address
        took.append(push_until_delivered(sender, receiver, number))
        sizes.append(size_of(receiver))
    assert max(took) < RECOVERY_S
    assert_all_is_over(receiver, keys)
    assert_no_growth(sizes)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_sender_serves_every_successor_of_a_killed_receiver(make: Make, rounds: int) -> None:
    sender, receiver = make("prefill"), make("decode")
    push_until_delivered(sender, receiver, 0)
    keys, sizes, took = [], [], []
    for number in range(rounds):
        keys.append(begin(sender, receiver, number))
        receiver.kill()
        receiver = make("decode", receiver.address)
        assert receiver.address
        if number % 2:
            sender.submit(final(keys[-1], SPAN.end, HERE))
        took.append(push_until_delivered(sender, receiver, number))
        assert answer(sender, keys[-1])
        sizes.append(size_of(sender))
    assert max(took) < RECOVERY_S
    assert_no_growth(sizes)


def test_receiver_is_served_again_by_a_sender_that_was_stopped_for_any_time(make: Make) -> None:
    """Shorter and longer than the time to be found silent."""
    sender, receiver = make("prefill"), make("decode")
    push_until_delivered(sender, receiver, 0)
    for number, stopped_s in enumerate((0.1, 0.5, 1.0, 3.0)):
        key = begin(sender, receiver, number)
        sender.freeze()
        thaw_at = time.monotonic() + stopped_s
        until(lambda thaw_at=thaw_at: time.monotonic() > thaw_at)  # type: ignore[misc]
        sender.thaw()
        assert push_until_delivered(sender, receiver, number) < RECOVERY_S
        if number % 2:
            sender.submit(final(key, SPAN.end, HERE))
        assert_all_is_over(receiver, [key])
        assert answer(sender, key)


def assert_no_growth(sizes: list[tuple[int, int]]) -> None:
    """After as many successors nothing is left of the first ones."""
    early, late = sizes[1], sizes[-1]
    assert late[0] <= early[0] + 2, f"file descriptors: {sizes}"
    assert late[1] <= early[1] + 1, f"threads: {sizes}"
