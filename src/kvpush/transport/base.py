"""The data plane as the transfer thread sees it.

One thread owns a transport from creation to `close` (NIXL's default mode takes no locks). No call waits on
the network; what takes time is reported by `poll`.
"""

from dataclasses import dataclass
from typing import Protocol

from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import Region
from kvpush.core.planner import Plan


@dataclass(frozen=True)
class OpDone:
    """One posted operation has stopped. `error` is "" when every byte is at its destination."""

    op: OpId
    error: str = ""


@dataclass(frozen=True)
class NoticeArrived:
    """The notice of a peer's WRITE; the bytes it was posted with are in our memory."""

    notice: bytes


TransportEvent = OpDone | NoticeArrived


class Transport(Protocol):
    """Moves bytes between registered memory of two processes.

    Every method but `close` may raise `TransportError`. None may raise anything else, but for
    `LocalProtocolError` when it is called from another thread than the owner.
    """

    @property
    def metadata(self) -> bytes:
        """What a peer needs for its `add_peer`; valid after `register`."""

    def register(self, regions: tuple[Region, ...], memory: str) -> None:
        """Make `regions` of this process readable and writable for peers. Called once, before peers."""

    def add_peer(self, peer: PeerName, metadata: bytes) -> None:
        """Load a peer. The same name again replaces it."""

    def remove_peer(self, peer: PeerName) -> None:
        """Drop a peer, its handles and mappings; unknown names are ignored. Operations still in flight to or from it
        are stopped as far as the transport can, and are reported by `poll` as failed."""

    def post_write(self, op: OpId, peer: PeerName, plan: Plan, notice: bytes) -> None:
        """Start copying `plan` from our memory into `peer`'s; `notice` arrives there after the data.

        An empty plan sends only the notice, an empty notice is not sent. Raising means that nothing was
        written and nothing will be.
        """

    def post_read(self, op: OpId, peer: PeerName, plan: Plan) -> None:
        """Start copying from the remote side of `plan`, in `peer`'s memory, to its local side in ours. The peer is not
        told. Raising means that nothing was read and nothing will be.
        """

    def poll(self) -> list[TransportEvent]:
        """What has finished or arrived since the last call, in no particular order across peers."""

    def close(self) -> None:
        """Release everything; idempotent."""
