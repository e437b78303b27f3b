"""Transfer threads against each other: real sockets, real threads, on the memory transport and on NIXL."""

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from runtime.rig import SECRET, nothing_left, until
from runtime.side import (
    BLOCK_SIZE,
    BLOCKS,
    BRISK,
    SETTLING,
    TOKEN_BYTES,
    Side,
    announce,
    answer,
    answers,
    final,
    new_key,
    receive,
    records,
    settle,
)

from kvpush.core.commands import Abort, Inquire, Keep, Stop, Withdraw
from kvpush.core.digests import NO_DIGESTS
from kvpush.core.errors import ConfigError, ControlError, Reason, TransportError
from kvpush.core.events import Found, Outcome, ReceiveEnded, SourceFree, Stopped
from kvpush.core.ids import Address, EngineId, RequestId, Target
from kvpush.core.layout import Span
from kvpush.runtime.thread import ThreadConfig
from kvpush.transport.base import Transport
from kvpush.transport.memory import MemoryFabric
from kvpush.transport.nixl import NixlTransport

MakeTransport = Callable[[str], Transport]
_names = itertools.count()

HERE, THERE = (3, 1, 4), (5, 9, 2)
TOKENS = 10


def nixl_transport(name: str) -> Transport:
    return NixlTransport(f"{name}-{next(_names)}")


@pytest.fixture(params=["memory", "nixl"])
def make_transport(request: pytest.FixtureRequest) -> MakeTransport:
    if request.param == "nixl":
        pytest.importorskip("nixl")
        return nixl_transport
    return MemoryFabric().transport


@pytest.fixture
def make_side(make_transport: MakeTransport) -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def make(name: str, secret: str = SECRET) -> Side:
        sides.append(Side(name, partial(make_transport, name), secret))
        return sides[-1]

    yield make
    for side in sides:
        side.stop()


@pytest.fixture
def sender(make_side: Callable[..., Side]) -> Side:
    side = make_side("prefill")
    side.fill(seed=1)
    side.start()
    return side


@pytest.fixture
def receiver(make_side: Callable[..., Side]) -> Side:
    side = make_side("decode")
    side.start()
    return side


def assert_delivered(sender: Side, receiver: Side, key_blocks: tuple[int, ...] = HERE) -> None:
    span = Span(0, TOKENS)
    assert receiver.tokens(span, THERE) == sender.tokens(span, key_blocks)
    assert not receiver.cache[:, [block for block in range(BLOCKS) if block not in (*THERE, SETTLING)]].any()


def test_push_arrives_when_the_receiver_registers_first(sender: Side, receiver: Side) -> None:
    key = new_key()
    receiver.submit(receive(key, sender.address, TOKENS, THERE))
    sender.submit(announce(key))
    settle(sender, receiver)
    sender.submit(final(key, TOKENS, HERE))
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.DELIVERED
    assert answer(sender, key) == SourceFree(key, RequestId(f"send-{key}"))
    assert_delivered(sender, receiver)


def test_push_arrives_when_the_prompt_is_final_first(sender: Side, receiver: Side) -> None:
    key = new_key()
    sender.submit(final(key, TOKENS, HERE))
    settle(sender, receiver)
    receiver.submit(receive(key, sender.address, TOKENS, THERE))
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.DELIVERED
    answer(sender, key)
    assert_delivered(sender, receiver)


def test_both_sides_record_the_same_transfer(sender: Side, receiver: Side) -> None:
    key = new_key()
    receiver.submit(receive(key, sender.address, TOKENS, THERE))
    sender.submit(final(key, TOKENS, HERE))
    answer(receiver, key)
    answer(sender, key)
    for side in (sender, receiver):
        (record,) = until(partial(lambda side: records(side.drain(), key), side))
        assert record.tokens == TOKENS
        assert TOKENS * TOKEN_BYTES <= record.nbytes <= len(HERE) * BLOCK_SIZE * TOKEN_BYTES
        assert list(record.at.values()) == sorted(record.at.values()), record.at


def test_many_pushes_are_each_answered_once(sender: Side, receiver: Side) -> None:
    keys = [new_key() for _ in range(60)]
    for number, key in enumerate(keys):
        receiver.submit(receive(key, sender.address, 4, (number,)))
        sender.submit(final(key, 4, (number,)))
    for key in keys:
        ended = answer(receiver, key)
        assert isinstance(ended, ReceiveEnded)
        assert ended.outcome is Outcome.DELIVERED
        answer(sender, key)
    assert (receiver.cache[:, :60] == sender.cache[:, :60]).all()
    assert all(len(answers(side.drain(), key)) == 1 for side in (sender, receiver) for key in keys)


def test_both_sides_can_send_and_receive_at_once(sender: Side, receiver: Side) -> None:
    there, back = new_key(), new_key()
    receiver.fill(seed=2)
    sender.submit(final(there, TOKENS, HERE), receive(back, receiver.address, TOKENS, (10, 11, 12)))
    receiver.submit(final(back, TOKENS, (20, 21, 22)), receive(there, sender.address, TOKENS, THERE))
    for side in (sender, receiver):
        until(partial(lambda side: answers(side.drain(), there) and answers(side.drain(), back), side))
    span = Span(0, TOKENS)
    assert receiver.tokens(span, THERE) == sender.tokens(span, HERE)
    assert sender.tokens(span, (10, 11, 12)) == receiver.tokens(span, (20, 21, 22))


def test_receive_fails_when_nobody_is_at_the_address(receiver: Side, make_side: Callable[..., Side]) -> None:
    absent = make_side("absent")
    absent.start()
    absent.stop()
    key = new_key()
    receiver.submit(receive(key, absent.address, TOKENS, THERE))
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert (ended.outcome, ended.reason) == (Outcome.FAILED, Reason.PEER_HANDSHAKE)


@pytest.mark.parametrize("secret", ["", "another secret altogether"])
def test_receive_fails_soon_when_the_secrets_differ(sender: Side, make_side: Callable[..., Side], secret: str) -> None:
    stranger = make_side("stranger", secret)
    stranger.start()
    key = new_key()
    sender.submit(final(key, TOKENS, HERE))
    stranger.submit(receive(key, sender.address, TOKENS, THERE))
    ended = answer(stranger, key, within_s=0.95 * BRISK.connect_timeout_s)
    assert isinstance(ended, ReceiveEnded)
    assert (ended.outcome, ended.reason) == (Outcome.FAILED, Reason.PEER_HANDSHAKE)
    assert not stranger.cache.any()


def test_receive_from_the_wrong_engine_is_refused(sender: Side, receiver: Side) -> None:
    key = new_key()
    receiver.submit(receive(key, sender.address, TOKENS, THERE, engine="the one before"))
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert (ended.outcome, ended.reason) == (Outcome.FAILED, Reason.WRONG_ENGINE)


def test_aborted_receive_and_withdrawn_send_are_answered(sender: Side, receiver: Side) -> None:
    aborted, withdrawn = new_key(), new_key()
    receiver.submit(receive(aborted, sender.address, TOKENS, THERE), Abort(aborted))
    assert isinstance(answer(receiver, aborted), ReceiveEnded)
    sender.submit(Withdraw(withdrawn, RequestId("r"), Reason.PREFILL_ABORTED))
    assert answer(sender, withdrawn) == SourceFree(withdrawn, RequestId("r"))


def test_start_says_which_port_is_in_use(sender: Side, make_side: Callable[..., Side]) -> None:
    second = make_side("second")
    second.listen_on(sender.address)
    with pytest.raises(ControlError, match=f"port {sender.address.port} is in use"):
        second.start()
    assert not second.thread.alive


def test_start_passes_on_why_there_is_no_transport() -> None:
    def broken() -> Transport:
        raise TransportError("no such device")

    side = Side("broken", broken)
    with nothing_left():
        with pytest.raises(TransportError, match="no such device"):
            side.start()
        assert not side.thread.alive


def test_stop_answers_every_transfer_in_flight(sender: Side, receiver: Side) -> None:
    waiting, held = new_key(), new_key()
    receiver.submit(receive(waiting, sender.address, TOKENS, THERE))
    sender.submit(announce(waiting), final(held, TOKENS, HERE))
    settle(sender, receiver)
    assert answers(sender.stop(), held) == [SourceFree(held, RequestId(f"send-{held}"))]
    ended = answer(receiver, waiting, within_s=1.0)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.FAILED
    assert not sender.thread.alive
    assert any(isinstance(event, Stopped) for event in sender.events)


def test_stop_of_a_receiver_releases_the_sender(sender: Side, receiver: Side) -> None:
    key = new_key()
    receiver.submit(receive(key, sender.address, TOKENS, THERE))
    sender.submit(announce(key))
    settle(sender, receiver)
    (ended,) = answers(receiver.stop(), key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.FAILED


def test_thread_leaves_nothing_behind(make_side: Callable[..., Side]) -> None:
    warm = [make_side("warm a"), make_side("warm b")]  # what a library keeps for the process is opened by its first use
    for side in warm:
        side.start()
        side.stop()
    with nothing_left():
        sender, receiver = make_side("prefill"), make_side("decode")
        sender.start()
        receiver.start()
        key = new_key()
        receiver.submit(receive(key, sender.address, TOKENS, THERE))
        sender.submit(final(key, TOKENS, HERE))
        answer(receiver, key)
        answer(sender, key)
        receiver.stop()
        sender.stop()
        assert sender.stop() == sender.events


def test_dead_thread_keeps_the_promises_of_commands(sender: Side) -> None:
    sender.stop()
    before = len(sender.events)
    received, sent, withdrawn, kept, asked = (new_key() for _ in range(5))
    nowhere = Target(Address("127.0.0.1", 1))
    sender.submit(
        receive(received, Address("127.0.0.1", 1), TOKENS, THERE),
        final(sent, TOKENS, HERE),
        Withdraw(withdrawn, RequestId("w"), Reason.PREFILL_FAILED),
        Keep(kept, RequestId("k"), TOKENS, (HERE,), NO_DIGESTS, 1.0),
        Inquire(asked, RequestId("i"), nowhere, NO_DIGESTS),
        Abort(received),
        Stop(),
    )
    told = sender.drain()[before:]
    assert told == [
        ReceiveEnded(
            received,
            RequestId(f"recv-{received}"),
            Outcome.FAILED,
            Reason.SHUTDOWN,
            "the transfer thread has ended",
        ),
        SourceFree(sent, RequestId(f"send-{sent}")),
        SourceFree(withdrawn, RequestId("w")),
        SourceFree(kept, RequestId("k")),
        Found(asked, RequestId("i"), 0),
    ]


def test_idle_thread_takes_no_turns(sender: Side) -> None:
    """Alone it sleeps: what woke it, if anything, has come before the command that asks."""
    sender.submit(Abort(new_key()))
    until(lambda: sender.turns() >= 2)
    settled = threading.Event()
    settled.wait(0.3)
    before = sender.turns()
    settled.wait(0.5)
    assert sender.turns() - before <= 1


def test_bad_command_is_logged_and_the_thread_goes_on(
    sender: Side, receiver: Side, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key()
    with caplog.at_level(logging.ERROR, "kvpush.transfer"):
        sender.submit(final(key, TOKENS, HERE), final(key, TOKENS, THERE))
        receiver.submit(receive(key, sender.address, TOKENS, THERE))
        ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.DELIVERED
    assert sender.thread.alive


GOOD = ThreadConfig(engine_id=EngineId("e"), listen=Address("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("secret", "short"), ("poll_us", 0), ("poll_us", 2_000_000), ("switch_us", -1), ("switch_us", 2_000_000)],
)
def test_bad_setting_is_refused_by_name(field: str, value: str | int) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        replace(GOOD, **{field: value})  # type: ignore[arg-type]


def test_thread_lowers_the_switch_interval_and_never_raises_it() -> None:
    before = sys.getswitchinterval()
    try:
        for switch_us, expected in ((0, before), (500, 0.0005), (4000, 0.0005)):
            config = replace(GOOD, switch_us=switch_us)
            side = Side("quick", lambda: MemoryFabric().transport("quick"), config=config)
            side.start()
            side.stop()
            assert sys.getswitchinterval() == expected
    finally:
        sys.setswitchinterval(before)
