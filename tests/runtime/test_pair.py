"""Two processes, NIXL between them, no vLLM."""

from collections.abc import Callable, Iterator

import pytest
from runtime.pair import RemoteSide, answer, close_all
from runtime.side import announce, final, new_key, receive

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, ReceiveEnded, SourceFree
from kvpush.core.ids import Address, RequestId
from kvpush.core.layout import Span

pytest.importorskip("nixl")
# a child imports torch with NIXL, which takes a busy machine a minute
pytestmark = pytest.mark.timeout(900)

SPAN = Span(0, 10)
HERE, THERE = (3, 1, 4), (5, 9, 2)
Make = Callable[..., RemoteSide]


@pytest.fixture(scope="module", params=["", "tcp"], ids=["shared memory", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[RemoteSide, RemoteSide]]:
    sides = [RemoteSide("prefill", ucx_tls=request.param), RemoteSide("decode", ucx_tls=request.param)]
    yield sides[0], sides[1]
    close_all(sides)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RemoteSide] = []

    def make(name: str, listen: Address | None = None) -> RemoteSide:
        made.append(RemoteSide(name, listen))
        return made[-1]

    yield make
    close_all(made)


def push(sender: RemoteSide, receiver: RemoteSide, seed: int) -> None:
    """One push, checked byte by byte."""
    key = new_key()
    sender.fill(seed)
    receiver.submit(receive(key, sender.address, SPAN.end, THERE))
    sender.submit(final(key, SPAN.end, HERE))
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.DELIVERED, ended
    assert answer(sender, key) == SourceFree(key, RequestId(f"send-{key}"))
    assert receiver.tokens(SPAN, THERE) == sender.tokens(SPAN, HERE)


def test_span_arrives_in_another_process(pair: tuple[RemoteSide, RemoteSide]) -> None:
    for seed in range(20):
        push(*pair, seed)


def test_span_arrives_the_other_way_round(pair: tuple[RemoteSide, RemoteSide]) -> None:
    push(pair[1], pair[0], seed=100)


def test_receiver_survives_the_death_of_its_sender_and_uses_the_next(make: Make) -> None:
    sender, receiver = make("prefill"), make("decode")
    push(sender, receiver, seed=1)
    key = new_key()
    receiver.submit(receive(key, sender.address, SPAN.end, THERE))
    sender.submit(announce(key))
    sender.kill()
    restarted = make("prefill", listen=sender.address)
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.FAILED
    assert ended.reason in (Reason.PEER_LOST, Reason.PEER_RESTARTED, Reason.WRONG_ENGINE)
    push(restarted, receiver, seed=2)


def test_sender_survives_the_death_of_its_receiver(make: Make) -> None:
    sender, receiver = make("prefill"), make("decode")
    push(sender, receiver, seed=1)
    key = new_key()
    receiver.submit(receive(key, sender.address, SPAN.end, THERE))
    receiver.kill()
    sender.submit(final(key, SPAN.end, HERE))
    assert isinstance(answer(sender, key), SourceFree)
    push(sender, make("decode"), seed=2)


def test_frozen_sender_costs_its_receiver_one_failed_transfer(make: Make) -> None:
    sender, receiver = make("prefill"), make("decode")
    push(sender, receiver, seed=1)
    sender.freeze()
    key = new_key()
    receiver.submit(receive(key, sender.address, SPAN.end, THERE))
    ended = answer(receiver, key)
    sender.thaw()
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.FAILED
    assert ended.reason in (Reason.PEER_SILENT, Reason.PEER_HANDSHAKE)
    push(sender, receiver, seed=2)
