"""What the memory transport promises beyond the contract: when bytes move, and between threads."""

import threading

import numpy as np
import pytest
from transport.rig import AREA, NOTHING, RECEIVER, Pair, Side, region, until

from kvpush.core.errors import TransportError
from kvpush.core.ids import OpId, PeerName
from kvpush.transport.base import NoticeArrived, OpDone
from kvpush.transport.memory import MemoryFabric


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def pair(fabric: MemoryFabric) -> Pair:
    return Pair.joined(fabric.transport("sender"), fabric.transport("receiver"))


def test_bytes_move_at_the_writers_poll_and_not_before(pair: Pair) -> None:
    pair.post(1, pair.plan((0, 0, AREA)), b"n")
    pair.receiver.poll()
    assert not pair.receiver.memory.any()
    assert pair.sender.transport.poll() == [OpDone(OpId(1))]
    assert np.array_equal(pair.receiver.memory, pair.sender.memory)
    assert pair.receiver.transport.poll() == [NoticeArrived(b"n")]


def test_writes_are_copied_in_the_order_they_were_posted(pair: Pair) -> None:
    pair.post(1, pair.plan((0, 0, 8)))
    pair.post(2, pair.plan((8, 0, 8)))
    pair.sender.poll()
    assert np.array_equal(pair.receiver.memory[:8], pair.sender.memory[8:16])


def test_removed_peer_is_never_written_to_again(pair: Pair) -> None:
    pair.post(1, pair.plan((0, 0, AREA)), b"n")
    pair.sender.transport.remove_peer(RECEIVER)
    pair.poll()
    assert "removed" in pair.sender.done(1)[0].error
    assert not pair.receiver.memory.any()
    assert not pair.receiver.notices


def test_write_to_a_closed_transport_fails_and_touches_nothing(pair: Pair) -> None:
    pair.post(1, pair.plan((0, 0, AREA)), b"n")
    pair.receiver.transport.close()
    pair.sender.poll()
    assert pair.sender.done(1)[0].error == "the peer is gone"
    assert not pair.receiver.memory.any()


def test_name_is_taken_until_its_transport_closes(fabric: MemoryFabric) -> None:
    first = fabric.transport("one")
    with pytest.raises(TransportError, match="named one already"):
        fabric.transport("one")
    first.close()
    fabric.transport("one").close()


def test_peer_of_another_fabric_is_not_found(pair: Pair) -> None:
    stranger = MemoryFabric().transport("stranger")
    with pytest.raises(TransportError, match="no transport named stranger"):
        pair.sender.transport.add_peer(PeerName("x"), stranger.metadata)


def test_restarted_peer_must_be_loaded_anew(fabric: MemoryFabric, pair: Pair) -> None:
    pair.receiver.transport.close()
    again = fabric.transport("receiver")
    memory = np.zeros(AREA, np.uint8)
    again.register((region(memory),), "dram")
    pair.post(1, pair.plan((0, 0, 8)))
    pair.sender.poll()
    assert pair.sender.done(1)[0].error == "the peer is gone"
    pair.sender.transport.add_peer(RECEIVER, again.metadata)
    pair.receiver.memory = memory
    pair.post(2, pair.plan((0, 0, 8)))
    pair.sender.poll()
    assert pair.sender.done(2)[0].error == ""
    assert np.array_equal(memory[:8], pair.sender.memory[:8])


def test_writing_before_registering_is_refused(fabric: MemoryFabric, pair: Pair) -> None:
    early = fabric.transport("early")
    early.add_peer(RECEIVER, pair.receiver.transport.metadata)
    with pytest.raises(TransportError, match="no memory has been registered"):
        early.post_write(OpId(1), RECEIVER, pair.plan((0, 0, 1)), b"")


def test_threads_write_to_each_other_all_the_time(fabric: MemoryFabric) -> None:
    turns = 200
    metadata: dict[str, bytes] = {}
    received: dict[str, list[bytes]] = {}
    together = threading.Barrier(2, timeout=30)

    def run(name: str, other: str) -> None:
        transport, memory = fabric.transport(name), np.zeros(AREA, np.uint8)
        transport.register((region(memory),), "dram")
        metadata[name] = transport.metadata
        together.wait()
        transport.add_peer(PeerName(other), metadata[other])
        side = Side(transport, memory)
        for turn in range(turns):
            transport.post_write(OpId(turn), PeerName(other), NOTHING, turn.to_bytes(2))
            side.poll()
        until(lambda: len(side.events) == 2 * turns, side.poll)
        together.wait()
        transport.close()
        received[name] = side.notices

    threads = [threading.Thread(target=run, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert received["a"] == received["b"] == [turn.to_bytes(2) for turn in range(turns)]
