"""Two joined transports with memory, and waiting for what they report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import Region
from kvpush.core.planner import Plan
from kvpush.transport.base import NoticeArrived, OpDone, Transport, TransportEvent

RECEIVER = PeerName("receiver")
AREA = 1 << 16


def region(memory: NDArray[np.uint8]) -> Region:
    """All of an array."""
    return Region(memory.ctypes.data, memory.nbytes)


def copy(source: NDArray[np.uint8], target: int, runs: Sequence[tuple[int, int, int]]) -> Plan:
    """A plan that copies `n` bytes from offset `a` of an array to offset `b` of an address, for (a, b, n)."""
    local, remote, nbytes = np.array(runs, np.int64).reshape(-1, 3).T
    return Plan(local + source.ctypes.data, remote + target, nbytes.copy())


NOTHING = Plan(*(np.empty(0, np.int64) for _ in range(3)))


@dataclass
class Side:
    """One transport, its memory, and what it has reported."""

    transport: Transport
    memory: NDArray[np.uint8]
    events: list[TransportEvent] = field(default_factory=list)

    def poll(self) -> None:
        self.events.extend(self.transport.poll())

    @property
    def notices(self) -> list[bytes]:
        return [event.notice for event in self.events if isinstance(event, NoticeArrived)]

    def heard(self, notice: bytes) -> bool:
        return notice in self.notices

    def done(self, op: int) -> list[OpDone]:
        return [event for event in self.events if isinstance(event, OpDone) and event.op == OpId(op)]


@dataclass
class Pair:
    """A sender that knows a receiver."""

    sender: Side
    receiver: Side

    @classmethod
    def joined(cls, sender: Transport, receiver: Transport) -> "Pair":
        rng = np.random.default_rng(7)
        pair = cls(Side(sender, rng.integers(1, 256, AREA, np.uint8)), Side(receiver, np.zeros(AREA, np.uint8)))
        for side in (pair.sender, pair.receiver):
            side.transport.register((region(side.memory),), "dram")
        sender.add_peer(RECEIVER, receiver.metadata)
        return pair

    def plan(self, *runs: tuple[int, int, int]) -> Plan:
        return copy(self.sender.memory, self.receiver.memory.ctypes.data, runs)

    def post(self, op: int, plan: Plan, notice: bytes = b"") -> None:
        self.sender.transport.post_write(OpId(op), RECEIVER, plan, notice)

    def read(self, op: int, plan: Plan) -> None:
        """The other way: from the plan's remote side into the sender's memory."""
        self.sender.transport.post_read(OpId(op), RECEIVER, plan)

    def poll(self) -> None:
        self.sender.poll()
        self.receiver.poll()

    def poll_until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        until(condition, self.poll, seconds)

    def close(self) -> None:
        self.sender.transport.close()
        self.receiver.transport.close()


def until(condition: Callable[[], object], step: Callable[[], None], seconds: float = 20.0) -> None:
    """Take steps until a condition holds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition has not come true in time"
        step()
