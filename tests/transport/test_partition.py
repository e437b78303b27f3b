"""NIXL over TCP when the network between two processes is cut."""

from collections.abc import Iterator

import pytest
from netns import Cable, cable
from transport.far import Far
from transport.rig import AREA, until

from kvpush.core.ids import OpId
from kvpush.transport.base import NoticeArrived, OpDone

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = pytest.mark.netns

TIMEOUT_S = 2


@pytest.fixture
def joined() -> Iterator[Cable]:
    with cable() as laid:
        if laid is None:
            pytest.skip("network namespaces cannot be made here")
        yield laid


@pytest.fixture
def ends(joined: Cable) -> Iterator[tuple[Far, Far]]:
    """A sender and a receiver, each behind its end of the cable, that have exchanged one write."""
    started = []
    for side, name in enumerate(("sender", "receiver")):
        environment = {
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": joined.devices[side],
            "UCX_TCP_USER_TIMEOUT": f"{TIMEOUT_S}s",
        }
        started.append(Far(name, environment, joined.inside(side)))
    sender, receiver = started
    assert sender.ask("add", "receiver", receiver.metadata) == ""
    write(1, sender, receiver)
    receiver.has(NoticeArrived(b"1"))
    sender.has(OpDone(OpId(1)))
    yield sender, receiver
    for far in started:
        far.kill()


def write(op: int, sender: Far, receiver: Far) -> None:
    sender.ask("write", op, "receiver", receiver.address, [(0, 0, AREA)], str(op).encode())


def test_write_into_a_cut_network_fails_by_itself(joined: Cable, ends: tuple[Far, Far]) -> None:
    sender, receiver = ends
    joined.cut()
    write(2, sender, receiver)
    assert sender.end_of(2).error


def test_write_survives_a_cut_that_is_shorter_than_the_timeout(joined: Cable, ends: tuple[Far, Far]) -> None:
    sender, receiver = ends
    joined.cut()
    write(2, sender, receiver)
    joined.mend()
    receiver.has(NoticeArrived(b"2"))
    assert sender.end_of(2).error == ""


def test_peer_is_reached_again_after_a_cut(joined: Cable, ends: tuple[Far, Far]) -> None:
    sender, receiver = ends
    joined.cut()
    write(2, sender, receiver)
    assert sender.end_of(2).error
    sender.ask("remove", "receiver")
    joined.mend()
    # for a moment the kernel still remembers that nobody answered
    until(lambda: sender.ask("add", "receiver", receiver.metadata) == "", sender.listen)
    write(3, sender, receiver)
    receiver.has(NoticeArrived(b"3"))
    assert sender.end_of(3).error == ""
