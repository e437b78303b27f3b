"""Two processes, NIXL between them, no vLLM."""

from collections.abc import Callable, Iterator

import pytest
from runtime.pair import RemoteSide, answer, close_all
from runtime.side import announce, final, new_key, receive

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, ReceiveEnded, SourceFree
from kvpush.core.ids import Address, RequestId
from kvpush.core.layout import Span
from kvpush.core.mode import Mode

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


def move(sender: RemoteSide, receiver: RemoteSide, seed: int, mode: Mode = Mode.PUSH) -> None:
    """One transfer, checked byte by byte."""
    key = new_key()
    sender.fill(seed)
    receiver.submit(receive(key, sender.address, SPAN.end, THERE, mode=mode))
    sender.submit(final(key, SPAN.end, HERE))
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.DELIVERED, ended
    assert answer(sender, key) == SourceFree(key, RequestId(f"send-{key}"))
    assert receiver.tokens(SPAN, THERE) == sender.tokens(SPAN, HERE)


@pytest.mark.parametrize("mode", Mode)
def test_span_arrives_in_another_process(pair: tuple[RemoteSide, RemoteSide], mode: Mode) -> None:
    for seed in range(20):
        move(*pair, seed, mode)


@pytest.mark.parametrize("mode", Mode)
def test_span_arrives_the_other_way_round(pair: tuple[RemoteSide, RemoteSide], mode: Mode) -> None:
    move(pair[1], pair[0], seed=100, mode=mode)


@pytest.mark.parametrize("mode", Mode)
def test_receiver_survives_the_death_of_its_sender_and_uses_the_next(make: Make, mode: Mode) -> None:
    sender, receiver = make("prefill"), make("decode")
    move(sender, receiver, seed=1, mode=mode)
    key = new_key()
    receiver.submit(receive(key, sender.address, SPAN.end, THERE, mode=mode))
    sender.submit(announce(key))
    sender.kill()
    restarted = make("prefill", listen=sender.address)
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.FAILED
    # silent: it died before it had answered the registration
    assert ended.reason in (Reason.PEER_LOST, Reason.PEER_RESTARTED, Reason.WRONG_ENGINE, Reason.PEER_SILENT)
    move(restarted, receiver, seed=2, mode=mode)


def test_sender_survives_the_death_of_its_receiver(make: Make) -> None:
    sender, receiver = make("prefill"), make("decode")
    move(sender, receiver, seed=1)
    key = new_key()
    receiver.submit(receive(key, sender.address, SPAN.end, THERE))
    receiver.kill()
    sender.submit(final(key, SPAN.end, HERE))
    assert isinstance(answer(sender, key), SourceFree)
    move(sender, make("decode"), seed=2)


def test_frozen_sender_costs_its_receiver_one_failed_transfer(make: Make) -> None:
    sender, receiver = make("prefill"), make("decode")
    move(sender, receiver, seed=1)
    sender.freeze()
    key = new_key()
    receiver.submit(receive(key, sender.address, SPAN.end, THERE))
    ended = answer(receiver, key)
    sender.thaw()
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.FAILED
    assert ended.reason in (Reason.PEER_SILENT, Reason.PEER_HANDSHAKE)
    move(sender, receiver, seed=2)
