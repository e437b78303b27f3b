"""Moves real bytes inside one process: for tests and simulations.

A `MemoryFabric` joins the `MemoryTransport`s made from it, which may be owned by different threads. Nothing
is copied when a write or a read is posted: the poster's own `poll` copies what it has posted so far, in order, so that
whoever calls `poll` decides when bytes move. A notice is there for the receiver as soon as its bytes are.
"""

import ctypes
from collections import deque
from dataclasses import dataclass, field
from threading import Lock

import msgspec

from kvpush.core.errors import TransportError
from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import Region
from kvpush.core.planner import Plan
from kvpush.transport.areas import Areas
from kvpush.transport.base import NoticeArrived, OpDone, TransportEvent
from kvpush.transport.owner import Owner


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    regions: tuple[Region, ...]


@dataclass(eq=False)
class _Port:
    """What others may touch of a transport."""

    notices: deque[bytes] = field(default_factory=deque)
    lock: Lock = field(default_factory=Lock)
    is_open: bool = True


@dataclass(frozen=True)
class _Peer:
    port: _Port
    areas: Areas


@dataclass(frozen=True, eq=False)
class _Posted:
    op: OpId
    peer: _Peer
    plan: Plan
    notice: bytes
    reads: bool


class MemoryFabric:
    """The process's memory, as a network: transports by name. A name is free again after `close`."""

    def __init__(self) -> None:
        self._ports: dict[str, _Port] = {}

    def transport(self, name: str) -> "MemoryTransport":
        """A new transport, owned by the calling thread. Raises `TransportError` if the name is taken."""
        port = self._ports.get(name)
        if port is not None and port.is_open:
            raise TransportError(f"there is a transport named {name} already")
        self._ports[name] = port = _Port()
        return MemoryTransport(self, name, port)

    def port(self, name: str) -> _Port:
        """Where to deliver to. Raises `TransportError` when nobody has that name."""
        try:
            return self._ports[name]
        except KeyError:
            raise TransportError(f"there is no transport named {name} in this process") from None


class MemoryTransport:
    """A `Transport` between addresses of this process. Make it with `MemoryFabric.transport`."""

    def __init__(self, fabric: MemoryFabric, name: str, port: _Port) -> None:
        self._fabric = fabric
        self._port = port
        self._metadata = _Metadata(name, ())
        self._areas: Areas | None = None
        self._peers: dict[PeerName, _Peer] = {}
        self._posted: deque[_Posted] = deque()
        self._stopped: list[OpDone] = []
        self._owner = Owner()

    @property
    def metadata(self) -> bytes:
        """The name and the regions, as MessagePack."""
        self._check("metadata")
        return msgspec.msgpack.encode(self._metadata)

    def register(self, regions: tuple[Region, ...], memory: str) -> None:
        """Take regions; the memory behind them must outlive the transport."""
        self._check("register")
        if memory != "dram":
            raise TransportError(f"memory '{memory}' cannot be reached from here, only 'dram'")
        self._areas = Areas(regions)
        self._metadata = _Metadata(self._metadata.name, regions)

    def add_peer(self, peer: PeerName, metadata: bytes) -> None:
        """Load a peer of the same fabric."""
        self._check("add_peer")
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise TransportError(f"{peer}: its transport metadata cannot be read: {error}") from None
        port, areas = self._fabric.port(theirs.name), Areas(theirs.regions)
        self.remove_peer(peer)
        self._peers[peer] = _Peer(port, areas)

    def remove_peer(self, peer: PeerName) -> None:
        """Forget a peer; what was not copied yet never will be."""
        self._check("remove_peer")
        removed = self._peers.pop(peer, None)
        stopped = [each for each in self._posted if each.peer is removed]
        self._posted = deque(each for each in self._posted if each.peer is not removed)
        self._stopped.extend(OpDone(each.op, f"peer {peer} was removed") for each in stopped)

    def post_write(self, op: OpId, peer: PeerName, plan: Plan, notice: bytes) -> None:
        """Check a write, and keep it for the next `poll`."""
        self._check("post_write")
        self._posted.append(_Posted(op, self._checked(peer, plan), plan, notice, False))

    def post_read(self, op: OpId, peer: PeerName, plan: Plan) -> None:
        """Check a read, and keep it for the next `poll`."""
        self._check("post_read")
        self._posted.append(_Posted(op, self._checked(peer, plan), plan, b"", True))

    def _checked(self, peer: PeerName, plan: Plan) -> _Peer:
        target = self._peers.get(peer)
        if target is None:
            raise TransportError(f"there is no peer {peer}")
        if self._areas is None:
            raise TransportError("no memory has been registered")
        self._areas.check(plan.local, plan.nbytes, "our registered")
        target.areas.check(plan.remote, plan.nbytes, f"{peer}'s registered")
        return target

    def poll(self) -> list[TransportEvent]:
        """Copy all that was posted, and collect notices."""
        self._check("poll")
        events: list[TransportEvent] = [*self._stopped]
        self._stopped.clear()
        while self._posted:
            posted = self._posted.popleft()
            events.append(OpDone(posted.op, _carry_out(posted)))
        while self._port.notices:
            events.append(NoticeArrived(self._port.notices.popleft()))
        return events

    def close(self) -> None:
        """Nothing is copied from or to this transport's memory any more."""
        self._owner.check("close")
        # a writer on another thread may be copying into our memory right now
        with self._port.lock:
            self._port.is_open = False
        self._port.notices.clear()
        self._posted.clear()
        self._peers.clear()

    def _check(self, what: str) -> None:
        self._owner.check(what)
        if not self._port.is_open:
            raise TransportError(f"{what}: the transport is closed")


def _carry_out(posted: _Posted) -> str:
    """Copy, then notify; returns why not."""
    port = posted.peer.port
    with port.lock:
        if not port.is_open:
            return "the peer is gone"
        plan = posted.plan
        sources, targets = (plan.remote, plan.local) if posted.reads else (plan.local, plan.remote)
        for source, target, nbytes in zip(sources.tolist(), targets.tolist(), plan.nbytes.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)
        if posted.notice:
            port.notices.append(posted.notice)
    return ""
