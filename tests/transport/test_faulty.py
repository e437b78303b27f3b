"""Each fault does what it says, on real bytes."""

from collections.abc import Callable

import numpy as np
import pytest
from transport.rig import AREA, RECEIVER, Pair

from kvpush.core.errors import TransportError
from kvpush.core.ids import OpId
from kvpush.transport.base import Transport
from kvpush.transport.faults import Fault, FaultKind, Faults, Script, Seeded
from kvpush.transport.faulty import FaultyTransport
from kvpush.transport.memory import MemoryFabric

K = FaultKind


def joined(sends: Faults, receives: Faults) -> Pair:
    fabric = MemoryFabric()
    sender, receiver = (fabric.transport(name) for name in ("sender", "receiver"))
    return Pair.joined(FaultyTransport(sender, sends), FaultyTransport(receiver, receives))


def sending(kind: FaultKind, polls: int = 3) -> Pair:
    """A pair whose first write goes wrong."""
    return joined(Script(Fault(kind, polls=polls)), Script())


def receiving(kind: FaultKind, polls: int = 3) -> Pair:
    """A pair whose first notice goes wrong."""
    return joined(Script(), Script(Fault(kind, polls=polls)))


def injected(transport: Transport) -> list[FaultKind]:
    assert isinstance(transport, FaultyTransport)
    return [fault.kind for fault in transport.injected]


def polls_until(pair: Pair, condition: Callable[[], object]) -> int:
    """How many polls of both sides it takes."""
    for count in range(1, 100):
        pair.poll()
        if condition():
            return count
    raise AssertionError("it has not come true in 100 polls")


def write(pair: Pair, op: int = 1) -> None:
    pair.post(op, pair.plan((0, 0, AREA // 2), (AREA // 2, AREA // 2, AREA // 2)), b"note")


def copied(pair: Pair) -> int:
    """How many bytes have arrived (the source has no zeros)."""
    return int(np.count_nonzero(pair.receiver.memory))


@pytest.mark.parametrize("kind", [K.READ_FAILS, K.READ_TORN, K.READ_LATE])
def test_fault_of_a_read_hits_the_first_one_only(kind: FaultKind) -> None:
    pair = sending(kind, polls=5)
    pair.receiver.memory[:] = 200
    before = pair.sender.memory.copy()
    pair.read(1, pair.plan((0, 0, 100), (1000, 1000, 100)))
    polls_until(pair, lambda: pair.sender.done(1))
    changed = int(np.count_nonzero(pair.sender.memory == 200) - np.count_nonzero(before == 200))
    assert bool(pair.sender.done(1)[0].error) == (kind is not K.READ_LATE)
    assert (changed > 150, changed > 0) == {K.READ_FAILS: (False, False), K.READ_TORN: (False, True)}.get(
        kind, (True, True)
    )
    pair.read(2, pair.plan((0, 0, 100)))
    polls_until(pair, lambda: pair.sender.done(2))
    assert pair.sender.done(2)[0].error == ""
    assert injected(pair.sender.transport) == [kind]


def test_read_that_is_refused_reads_nothing() -> None:
    pair = sending(K.READ_RAISES)
    with pytest.raises(TransportError, match="injected"):
        pair.read(1, pair.plan((0, 0, 100)))


def test_read_that_is_stuck_ends_with_its_peer() -> None:
    pair = sending(K.READ_STUCK)
    pair.read(1, pair.plan((0, 0, 100)))
    for _ in range(50):
        pair.poll()
    assert not pair.sender.done(1)
    pair.sender.transport.remove_peer(RECEIVER)
    polls_until(pair, lambda: pair.sender.done(1))
    assert "removed" in pair.sender.done(1)[0].error


def test_peer_that_cannot_be_loaded_takes_no_writes() -> None:
    with pytest.raises(TransportError, match="injected: receiver"):
        sending(K.ADD_PEER_FAILS)


def test_refused_post_writes_nothing_and_the_next_one_works() -> None:
    pair = sending(K.POST_RAISES)
    with pytest.raises(TransportError, match="injected"):
        write(pair)
    pair.poll()
    assert (copied(pair), pair.sender.events, pair.receiver.events) == (0, [], [])
    write(pair, 2)
    polls_until(pair, lambda: pair.sender.done(2) and pair.receiver.notices)
    assert injected(pair.sender.transport) == [K.POST_RAISES]


def test_failed_write_is_reported_later_and_has_written_nothing() -> None:
    pair = sending(K.WRITE_FAILS, polls=4)
    write(pair)
    assert polls_until(pair, lambda: pair.sender.done(1)) == 4
    assert "injected" in pair.sender.done(1)[0].error
    assert (copied(pair), pair.receiver.notices) == (0, [])


def test_torn_write_has_written_half_and_sends_no_notice() -> None:
    pair = sending(K.WRITE_TORN)
    write(pair)
    polls_until(pair, lambda: pair.sender.done(1))
    assert "half way" in pair.sender.done(1)[0].error
    pair.poll()
    assert (copied(pair), pair.receiver.notices) == (AREA // 2, [])


def test_torn_write_of_one_descriptor_has_written_half_of_it() -> None:
    pair = sending(K.WRITE_TORN)
    pair.post(1, pair.plan((0, 0, 100)), b"note")
    polls_until(pair, lambda: pair.sender.done(1))
    assert copied(pair) == 50


def test_late_write_moves_no_byte_before_its_time() -> None:
    pair = sending(K.WRITE_LATE, polls=5)
    write(pair)
    for _ in range(4):
        pair.poll()
    assert copied(pair) == 0
    pair.poll()
    assert copied(pair) == AREA
    assert pair.sender.done(1)[0].error == ""
    assert pair.receiver.notices == [b"note"]


def test_late_write_that_cannot_be_posted_fails() -> None:
    pair = sending(K.WRITE_LATE)
    pair.post(1, pair.plan((0, AREA, 1)), b"note")
    polls_until(pair, lambda: pair.sender.done(1))
    assert "outside" in pair.sender.done(1)[0].error


@pytest.mark.parametrize("kind", [K.WRITE_STUCK, K.WRITE_LATE])
def test_write_that_is_held_back_ends_when_its_peer_is_removed(kind: FaultKind) -> None:
    pair = sending(kind, polls=50)
    write(pair)
    for _ in range(20):
        pair.poll()
    assert not pair.sender.done(1)
    pair.sender.transport.remove_peer(RECEIVER)
    polls_until(pair, lambda: pair.sender.done(1))
    for _ in range(100):
        pair.poll()
    assert [end.error for end in pair.sender.done(1)] == ["peer receiver was removed"]
    assert copied(pair) == 0


def test_notice_comes_before_a_late_completion() -> None:
    pair = sending(K.DONE_LATE, polls=6)
    write(pair)
    assert polls_until(pair, lambda: pair.receiver.notices) == 1
    assert not pair.sender.done(1)
    assert polls_until(pair, lambda: pair.sender.done(1)) == 6
    assert pair.sender.done(1)[0].error == ""


def test_lost_notice_never_comes_though_the_bytes_do() -> None:
    pair = receiving(K.NOTICE_LOST)
    write(pair)
    for _ in range(50):
        pair.poll()
    assert (copied(pair), pair.receiver.notices) == (AREA, [])
    assert injected(pair.receiver.transport) == [K.NOTICE_LOST]


def test_doubled_notice_comes_now_and_later() -> None:
    pair = receiving(K.NOTICE_TWICE, polls=4)
    write(pair)
    assert polls_until(pair, lambda: pair.receiver.notices) == 1
    assert polls_until(pair, lambda: len(pair.receiver.notices) == 2) == 4
    for _ in range(20):
        pair.poll()
    assert pair.receiver.notices == [b"note"] * 2


def test_late_notice_comes_once_in_its_time() -> None:
    pair = receiving(K.NOTICE_LATE, polls=4)
    write(pair)
    assert polls_until(pair, lambda: pair.receiver.notices) == 5
    for _ in range(20):
        pair.poll()
    assert pair.receiver.notices == [b"note"]


@pytest.mark.parametrize("seed", range(20))
def test_every_write_ends_at_most_once_whatever_goes_wrong(seed: int) -> None:
    rates: dict[FaultKind, float] = {kind: 0.1 for kind in K if kind is not K.ADD_PEER_FAILS}
    pair = joined(Seeded(seed, rates), Seeded(seed + 1000, rates))
    refused = 0
    for op in range(50):
        try:
            pair.post(op, pair.plan((op, op, 1)), bytes([op]))
        except TransportError:
            refused += 1
        pair.poll()
    pair.sender.transport.remove_peer(RECEIVER)
    for _ in range(20):
        pair.poll()
    ends = [event.op for event in pair.sender.events if hasattr(event, "op")]
    assert len(ends) == len(set(ends)) == 50 - refused
    succeeded = {op for op in range(50) if pair.sender.done(op) and not pair.sender.done(op)[0].error}
    assert {OpId(notice[0]) for notice in pair.receiver.notices} <= succeeded
    assert all(pair.receiver.memory[op] == pair.sender.memory[op] for op in succeeded)
