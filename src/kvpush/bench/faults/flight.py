"""Writes and reads that take time, and go on without the process that posted them, as a network card's do."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvpush.core.errors import TransportError
from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import Region
from kvpush.core.planner import Plan
from kvpush.transport.base import OpDone, TransportEvent
from kvpush.transport.memory import MemoryTransport

FLIGHT_S = 0.01


@dataclass(frozen=True, eq=False)
class _Flying:
    lands_at: float
    op: OpId
    peer: PeerName
    plan: Plan
    notice: bytes | None  # None: a read
    is_given_up: bool = False


class FlightTransport:
    """A `Transport`: memory's, but each operation lands `FLIGHT_S` after it was posted, whatever its process does then.
    A read lands even after its peer was removed: nothing calls back what the peer's card has sent."""

    def __init__(self, inner: MemoryTransport, clock: Callable[[], float]) -> None:
        self.landed = 0
        self._inner = inner
        self._clock = clock
        self._flying: list[_Flying] = []
        self._events: list[TransportEvent] = []

    @property
    def flying(self) -> int:
        """What has been posted and has not landed."""
        return len(self._flying)

    @property
    def next_at(self) -> float:
        """When the next of them lands."""
        return min((each.lands_at for each in self._flying), default=float("inf"))

    def delay(self, seconds: float) -> bool:
        """Let what is in flight land later; False when nothing is."""
        self._flying = [replace(each, lands_at=each.lands_at + seconds) for each in self._flying]
        return bool(self._flying)

    def land(self) -> None:
        """Let land what is due by now."""
        due = [each for each in self._flying if each.lands_at <= self._clock()]
        self._flying = [each for each in self._flying if each not in due]
        for each in due:
            self._land(each)
        self._events += self._inner.poll()

    def _land(self, each: _Flying) -> None:
        if each.is_given_up:
            _copy(each.plan)
            return
        try:
            if each.notice is None:
                self._inner.post_read(each.op, each.peer, each.plan)
            else:
                self._inner.post_write(each.op, each.peer, each.plan, each.notice)
            self.landed += 1
        except TransportError as error:
            self._events.append(OpDone(each.op, str(error)))

    # as a `Transport` -----------------------------------------------------------------------------------
    @property
    def metadata(self) -> bytes:
        """Memory's."""
        return self._inner.metadata

    def register(self, regions: tuple[Region, ...], memory: str) -> None:
        """Take regions."""
        self._inner.register(regions, memory)

    def add_peer(self, peer: PeerName, metadata: bytes) -> None:
        """Load a peer."""
        self._inner.add_peer(peer, metadata)

    def remove_peer(self, peer: PeerName) -> None:
        """Stop the writes that are in flight to a peer, and forget the reads from it."""
        stopped = [each for each in self._flying if each.peer == peer and not each.is_given_up]
        reads = [replace(each, is_given_up=True) for each in stopped if each.notice is None]
        self._flying = [each for each in self._flying if each not in stopped] + reads
        self._events += (OpDone(each.op, f"peer {peer} was removed") for each in stopped)
        self._inner.remove_peer(peer)

    def post_write(self, op: OpId, peer: PeerName, plan: Plan, notice: bytes) -> None:
        """Start a write."""
        self._flying.append(_Flying(self._clock() + FLIGHT_S, op, peer, plan, notice))

    def post_read(self, op: OpId, peer: PeerName, plan: Plan) -> None:
        """Start a read."""
        self._flying.append(_Flying(self._clock() + FLIGHT_S, op, peer, plan, None))

    def poll(self) -> list[TransportEvent]:
        """What has landed, failed or arrived."""
        self.land()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Nothing can land here any more."""
        self._inner.close()


def _copy(plan: Plan) -> None:
    """Carry out a read whose reader has let go of it."""
    for local, remote, nbytes in zip(plan.local.tolist(), plan.remote.tolist(), plan.nbytes.tolist(), strict=True):
        ctypes.memmove(local, remote, nbytes)
