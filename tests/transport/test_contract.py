"""What every transport must do: the same tests on the memory, the faulty (without faults) and the NIXL transport."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import numpy as np
import pytest
from transport.rig import AREA, NOTHING, RECEIVER, Pair, Side, region

from kvpush.core.errors import LocalProtocolError, TransportError
from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import Region
from kvpush.transport.base import Transport
from kvpush.transport.faults import Script
from kvpush.transport.faulty import FaultyTransport
from kvpush.transport.memory import MemoryFabric
from kvpush.transport.nixl import NixlTransport

Make = Callable[[], Transport]

_numbers = count()


def _memory() -> Make:
    fabric = MemoryFabric()
    return lambda: fabric.transport(f"m{next(_numbers)}")


def _faulty() -> Make:
    make = _memory()
    return lambda: FaultyTransport(make(), Script())


def _nixl() -> Make:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    return lambda: NixlTransport(f"n{next(_numbers)}")


@pytest.fixture(params=[_memory, _faulty, _nixl], ids=["memory", "faulty", "nixl"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Transport] = []
    kind: Make = request.param()

    def make_one() -> Transport:
        made.append(kind())
        return made[-1]

    yield make_one
    for transport in made:
        transport.close()


@pytest.fixture
def pair(make: Make) -> Pair:
    return Pair.joined(make(), make())


def test_write_copies_its_runs_and_nothing_else(pair: Pair) -> None:
    pair.post(1, pair.plan((0, 100, 50), (1000, 5000, 1), (3000, 200, 4096)), b"n")
    pair.poll_until(lambda: pair.receiver.notices and pair.sender.done(1))
    expected = np.zeros(AREA, np.uint8)
    for source, target, nbytes in ((0, 100, 50), (1000, 5000, 1), (3000, 200, 4096)):
        expected[target : target + nbytes] = pair.sender.memory[source : source + nbytes]
    assert np.array_equal(pair.receiver.memory, expected)


def test_write_is_reported_once_on_both_sides(pair: Pair) -> None:
    pair.post(7, pair.plan((0, 0, 10)), b"note 7")
    pair.poll_until(lambda: pair.receiver.notices and pair.sender.done(7))
    for _ in range(100):
        pair.poll()
    assert [event.error for event in pair.sender.done(7)] == [""]
    assert pair.receiver.notices == [b"note 7"]


def test_data_is_there_whenever_the_notice_is(pair: Pair) -> None:
    for turn in range(1, 50):
        pair.sender.memory[:] = turn
        pair.post(turn, pair.plan(*((i * 1024, i * 1024, 512) for i in range(64))), bytes([turn]))
        pair.poll_until(partial(pair.receiver.heard, bytes([turn])))
        assert (pair.receiver.memory.reshape(-1, 1024)[:, :512] == turn).all()
        pair.poll_until(partial(pair.sender.done, turn))


def test_notice_may_hold_any_bytes(pair: Pair) -> None:
    notice = bytes(range(256)) * 4
    pair.post(1, pair.plan((0, 0, 1)), notice)
    pair.poll_until(lambda: pair.receiver.notices == [notice])


def test_empty_plan_sends_only_its_notice(pair: Pair) -> None:
    pair.post(1, NOTHING, b"nothing")
    pair.poll_until(lambda: pair.receiver.notices == [b"nothing"] and pair.sender.done(1))
    assert not pair.receiver.memory.any()


def test_empty_notice_is_not_sent(pair: Pair) -> None:
    pair.post(1, pair.plan((0, 0, 10)), b"")
    pair.post(2, pair.plan((10, 10, 10)), b"second")
    pair.poll_until(lambda: pair.receiver.notices and pair.sender.done(1) and pair.sender.done(2))
    assert pair.receiver.notices == [b"second"]


def test_many_writes_in_flight_all_end(pair: Pair) -> None:
    for op in range(100):
        pair.post(op, pair.plan((op * 64, op * 64, 64)), op.to_bytes(2))
    pair.poll_until(lambda: len(pair.receiver.notices) == 100 and all(pair.sender.done(op) for op in range(100)))
    assert np.array_equal(pair.receiver.memory[:6400], pair.sender.memory[:6400])
    assert {int.from_bytes(notice) for notice in pair.receiver.notices} == set(range(100))


def test_both_sides_can_write_at_once(pair: Pair) -> None:
    there, back = pair.plan((0, 0, 100)), pair.plan((200, 200, 100))
    pair.receiver.memory[200:300] = 9
    pair.receiver.transport.add_peer(PeerName("sender"), pair.sender.transport.metadata)
    pair.post(1, there, b"there")
    reverse = type(back)(back.remote, back.local, back.nbytes)
    pair.receiver.transport.post_write(OpId(1), PeerName("sender"), reverse, b"back")
    pair.poll_until(lambda: pair.receiver.notices == [b"there"] and pair.sender.notices == [b"back"])
    assert (pair.sender.memory[200:300] == 9).all()


def test_write_to_an_unknown_peer_is_refused(pair: Pair) -> None:
    with pytest.raises(TransportError, match="no peer nobody"):
        pair.sender.transport.post_write(OpId(1), PeerName("nobody"), pair.plan((0, 0, 1)), b"n")


@pytest.mark.parametrize("run", [(0, AREA - 1, 2), (0, -1, 1), (AREA - 1, 0, 2), (-1, 0, 1)])
def test_write_outside_of_registered_memory_is_refused_whole(pair: Pair, run: tuple[int, int, int]) -> None:
    with pytest.raises(TransportError):
        pair.post(1, pair.plan((0, 0, 10), run), b"n")
    pair.post(2, pair.plan((20, 20, 10)), b"after")
    pair.poll_until(lambda: pair.receiver.notices and pair.sender.done(2))
    assert pair.receiver.notices == [b"after"]
    assert not pair.sender.done(1)
    assert not pair.receiver.memory[:10].any()


@pytest.mark.parametrize("metadata", [b"", b"junk", b"\x81\xa4name\xa1x"])
def test_peer_with_unreadable_metadata_is_refused(make: Make, metadata: bytes) -> None:
    transport = make()
    with pytest.raises(TransportError, match="odd"):
        transport.add_peer(PeerName("odd"), metadata)


def test_unknown_memory_is_refused(make: Make) -> None:
    memory = np.zeros(10, np.uint8)
    with pytest.raises(TransportError, match="punched cards"):
        make().register((region(memory),), "punched cards")


def test_adding_a_peer_again_replaces_it(pair: Pair) -> None:
    pair.sender.transport.add_peer(RECEIVER, pair.receiver.transport.metadata)
    pair.post(1, pair.plan((0, 0, 10)), b"n")
    pair.poll_until(lambda: pair.receiver.notices and pair.sender.done(1))
    assert pair.sender.done(1)[0].error == ""


def test_removed_peer_takes_no_writes(pair: Pair) -> None:
    pair.sender.transport.remove_peer(RECEIVER)
    pair.sender.transport.remove_peer(RECEIVER)
    with pytest.raises(TransportError, match="no peer receiver"):
        pair.post(1, pair.plan((0, 0, 10)), b"n")


def test_every_write_ends_once_when_its_peer_is_removed(pair: Pair) -> None:
    for op in range(10):
        pair.post(op, pair.plan((0, 0, 1000)), b"")
    pair.sender.transport.remove_peer(RECEIVER)
    pair.poll_until(lambda: all(pair.sender.done(op) for op in range(10)))
    for _ in range(100):
        pair.poll()
    assert [len(pair.sender.done(op)) for op in range(10)] == [1] * 10


def test_removed_peer_can_come_back(pair: Pair) -> None:
    pair.sender.transport.remove_peer(RECEIVER)
    pair.sender.transport.add_peer(RECEIVER, pair.receiver.transport.metadata)
    pair.post(1, pair.plan((5, 5, 10)), b"back")
    pair.poll_until(lambda: pair.receiver.notices == [b"back"] and pair.sender.done(1))
    assert np.array_equal(pair.receiver.memory[5:15], pair.sender.memory[5:15])


# reads ----------------------------------------------------------------------------------------------------
def test_read_copies_its_runs_and_nothing_else(pair: Pair) -> None:
    """`sender` has memory without zeros; it reads from `receiver`, whose memory is 200 everywhere."""
    pair.receiver.memory[:] = 200
    before = pair.sender.memory.copy()
    pair.read(1, pair.plan((100, 0, 50), (5000, 1000, 1), (200, 3000, 4096)))
    pair.poll_until(lambda: pair.sender.done(1))
    for target, nbytes in ((100, 50), (5000, 1), (200, 4096)):
        before[target : target + nbytes] = 200
    assert np.array_equal(pair.sender.memory, before)
    assert (pair.receiver.memory == 200).all()
    assert pair.receiver.notices == []


def test_every_byte_is_there_when_a_read_is_done(pair: Pair) -> None:
    for turn in range(1, 50):
        pair.receiver.memory[:] = turn
        pair.read(turn, pair.plan(*((i * 1024, i * 1024, 512) for i in range(64))))
        pair.poll_until(partial(pair.sender.done, turn))
        assert (pair.sender.memory.reshape(-1, 1024)[:, :512] == turn).all()


def test_reads_and_writes_to_one_peer_go_on_at_once(pair: Pair) -> None:
    pair.receiver.memory[:100] = 9
    pair.read(-1, pair.plan((0, 0, 100)))
    pair.post(1, pair.plan((500, 500, 100)), b"n")
    pair.read(-2, NOTHING)
    pair.poll_until(lambda: all(map(pair.sender.done, (-1, -2, 1))) and pair.receiver.notices)
    assert (pair.sender.memory[:100] == 9).all()
    assert np.array_equal(pair.receiver.memory[500:600], pair.sender.memory[500:600])


@pytest.mark.parametrize("run", [(0, AREA - 1, 2), (0, -1, 1), (AREA - 1, 0, 2), (-1, 0, 1)])
def test_read_outside_of_registered_memory_is_refused_whole(pair: Pair, run: tuple[int, int, int]) -> None:
    before = pair.sender.memory.copy()
    with pytest.raises(TransportError):
        pair.read(1, pair.plan((0, 0, 10), run))
    pair.read(2, pair.plan((20, 20, 10)))
    pair.poll_until(lambda: pair.sender.done(2))
    assert not pair.sender.done(1)
    assert np.array_equal(pair.sender.memory[:10], before[:10])


def test_read_from_an_unknown_peer_is_refused(pair: Pair) -> None:
    with pytest.raises(TransportError, match="no peer nobody"):
        pair.sender.transport.post_read(OpId(1), PeerName("nobody"), pair.plan((0, 0, 1)))


def test_every_read_ends_once_when_its_peer_is_removed(pair: Pair) -> None:
    for op in range(10):
        pair.read(op, pair.plan((0, 0, 1000)))
    pair.sender.transport.remove_peer(RECEIVER)
    pair.poll_until(lambda: all(pair.sender.done(op) for op in range(10)))
    for _ in range(100):
        pair.poll()
    assert [len(pair.sender.done(op)) for op in range(10)] == [1] * 10


# several peers and regions --------------------------------------------------------------------------------
def test_one_sender_reaches_several_receivers(make: Make) -> None:
    pair = Pair.joined(make(), make())
    other, memory = make(), np.zeros(AREA, np.uint8)
    other.register((region(memory),), "dram")
    pair.sender.transport.add_peer(PeerName("other"), other.metadata)
    pair.post(1, pair.plan((0, 0, 10)), b"one")
    shift = memory.ctypes.data - pair.receiver.memory.ctypes.data
    plan = pair.plan((100, 100, 10))
    pair.sender.transport.post_write(
        OpId(2), PeerName("other"), type(plan)(plan.local, plan.remote + shift, plan.nbytes), b""
    )

    def poll_other() -> bool:
        other.poll()
        return bool(pair.receiver.notices and pair.sender.done(1) and pair.sender.done(2))

    pair.poll_until(poll_other)
    assert np.array_equal(memory[100:110], pair.sender.memory[100:110])
    assert not pair.receiver.memory[100:110].any()


def test_several_regions_are_reachable(make: Make) -> None:
    sender, receiver = make(), make()
    source, target = np.arange(200, dtype=np.uint8), np.zeros(200, np.uint8)
    halves = tuple(Region(target.ctypes.data + half * 100, 100) for half in range(2))
    sender.register((region(source),), "dram")
    receiver.register(halves, "dram")
    sender.add_peer(RECEIVER, receiver.metadata)
    pair = Pair(*(Side(t, m) for t, m in ((sender, source), (receiver, target))))
    pair.post(1, pair.plan((50, 50, 50), (100, 100, 50)), b"n")
    pair.poll_until(lambda: pair.receiver.notices)
    assert np.array_equal(target[50:150], source[50:150])


def test_other_threads_are_turned_away(pair: Pair) -> None:
    caught: list[BaseException] = []

    def call() -> None:
        for method in (pair.sender.transport.poll, pair.sender.transport.close, lambda: pair.sender.transport.metadata):
            try:
                method()
            except LocalProtocolError as error:
                caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(caught) == 3
    pair.poll()


def test_closed_transport_refuses_all_and_closes_twice(pair: Pair) -> None:
    pair.sender.transport.close()
    pair.sender.transport.close()
    with pytest.raises(TransportError, match="closed"):
        pair.sender.transport.poll()
    with pytest.raises(TransportError, match="closed"):
        pair.post(1, pair.plan((0, 0, 1)), b"n")
