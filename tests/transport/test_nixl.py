"""NIXL between real processes, over shared memory and over TCP, and what it does when one of them goes."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from transport.far import Far
from transport.rig import AREA, Pair

from kvpush.core.errors import TransportError
from kvpush.core.ids import OpId, PeerName
from kvpush.transport.base import NoticeArrived, OpDone
from kvpush.transport.nixl import TCP_TIMEOUT, NixlTransport

pytest.importorskip("nixl", reason="NIXL is not installed")

Start = Callable[[], Far]

_numbers = count()


@pytest.fixture(scope="module", params=[{}, {"UCX_TLS": "tcp"}], ids=["shared-memory", "tcp"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(request.param)


@pytest.fixture(scope="module")
def sender(environment: dict[str, str]) -> Iterator[Far]:
    """The survivor: one process through all of it."""
    far = Far("sender", environment)
    yield far
    far.kill()


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    started: list[Far] = []

    def start_one() -> Far:
        started.append(Far(f"receiver {next(_numbers)}", environment))
        return started[-1]

    yield start_one
    for far in started:
        far.kill()


@pytest.fixture
def receiver(start: Start, sender: Far) -> Iterator[Far]:
    far = start()
    sender.events.clear()
    assert sender.ask("add", "receiver", far.metadata) == ""
    yield far
    sender.ask("remove", "receiver")


def write(op: int, sender: Far, receiver: Far, notice: bytes, name: str = "receiver") -> None:
    sender.ask("write", op, name, receiver.address, [(0, 0, AREA)], notice)


def test_write_reaches_another_process(sender: Far, receiver: Far) -> None:
    sender.ask("fill", 7)
    sender.ask("write", 1, "receiver", receiver.address, [(i, AREA - 2 * i, 9) for i in range(10, 500, 10)], b"n")
    receiver.has(NoticeArrived(b"n"))
    sender.has(OpDone(OpId(1)))
    expected = bytearray(AREA)
    for i in range(10, 500, 10):
        expected[AREA - 2 * i : AREA - 2 * i + 9] = bytes([7]) * 9
    assert receiver.ask("read") == bytes(expected)


def test_bytes_are_there_with_each_notice(sender: Far, receiver: Far) -> None:
    for turn in range(1, 30):
        sender.ask("fill", turn)
        write(turn, sender, receiver, bytes([turn]))
        receiver.has(NoticeArrived(bytes([turn])))
        assert receiver.ask("read") == bytes([turn]) * AREA
        sender.has(OpDone(OpId(turn)))


def test_write_to_a_killed_process_fails_and_others_go_on(start: Start, sender: Far, receiver: Far) -> None:
    other = start()
    assert sender.ask("add", "other", other.metadata) == ""
    write(1, sender, receiver, b"before")
    sender.has(OpDone(OpId(1)))
    receiver.kill()
    write(2, sender, receiver, b"after")
    assert sender.end_of(2).error
    write(3, sender, other, b"other", name="other")
    other.has(NoticeArrived(b"other"))
    assert sender.end_of(3).error == ""


def test_restarted_process_is_reached_under_the_same_name(start: Start, sender: Far, receiver: Far) -> None:
    write(1, sender, receiver, b"before")
    sender.has(OpDone(OpId(1)))
    receiver.kill()
    again = start()
    assert sender.ask("add", "receiver", again.metadata) == ""
    write(2, sender, again, b"again")
    again.has(NoticeArrived(b"again"))
    assert sender.end_of(2).error == ""


def test_write_to_a_stopped_process_ends_when_it_is_removed(sender: Far, receiver: Far) -> None:
    write(1, sender, receiver, b"before")
    sender.has(OpDone(OpId(1)))
    receiver.signal(signal.SIGSTOP)
    write(2, sender, receiver, b"after")
    sender.ask("remove", "receiver")
    assert "removed" in sender.end_of(2).error


def test_process_that_was_stopped_takes_writes_again(sender: Far, receiver: Far) -> None:
    write(1, sender, receiver, b"before")
    sender.has(OpDone(OpId(1)))
    receiver.signal(signal.SIGSTOP)
    write(2, sender, receiver, b"meanwhile")
    receiver.signal(signal.SIGCONT)
    receiver.has(NoticeArrived(b"meanwhile"))
    assert sender.end_of(2).error == ""


def test_agent_that_is_loaded_already_is_refused_under_a_second_name(sender: Far, receiver: Far) -> None:
    transport = NixlTransport("mine")
    transport.add_peer(PeerName("one"), receiver.metadata)
    with pytest.raises(TransportError, match="loaded as one already"):
        transport.add_peer(PeerName("two"), receiver.metadata)
    transport.close()


def test_missing_nixl_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransportError, match="pip install"):
        NixlTransport("nobody")


def test_unknown_backend_is_refused_with_those_that_exist() -> None:
    with pytest.raises(TransportError, match=r"no backend TELEPATHY here; it has .*UCX"):
        NixlTransport("nobody", {"UCX": {}, "TELEPATHY": {}})


def test_tcp_gives_up_before_a_quarantine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TCP_USER_TIMEOUT", raising=False)
    NixlTransport("one").close()
    assert os.environ["UCX_TCP_USER_TIMEOUT"] == TCP_TIMEOUT
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "3s")
    NixlTransport("two").close()
    assert os.environ["UCX_TCP_USER_TIMEOUT"] == "3s"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closed_transports_leave_nothing_open() -> None:
    def one_life(number: int) -> None:
        pair = Pair.joined(NixlTransport(f"a{number}"), NixlTransport(f"b{number}"))
        pair.post(1, pair.plan((0, 0, 100)), b"n")
        pair.poll_until(lambda: pair.sender.done(1) and pair.receiver.notices)
        pair.close()

    one_life(0)  # what NIXL keeps for the whole process
    gc.collect()
    before = open_files(), len(os.listdir("/proc/self/task")), threading.active_count()
    for number in range(1, 6):
        one_life(number)
    gc.collect()
    assert (open_files(), len(os.listdir("/proc/self/task")), threading.active_count()) == before
