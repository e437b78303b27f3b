"""The peers that the transport has loaded, whichever way they are used.

The same process may be a receiver that has said hello to us and a sender that we read from. The transport knows it
once. Closing the way to it for the sake of one use stops the operations of the other, too; its way is opened again.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvpush.core.effects import AddPeer, RemovePeer
from kvpush.core.ids import PeerName
from kvpush.core.outbox import Outbox


class Use(StrEnum):
    """What a peer is to us."""

    RECEIVER = "receiver"
    SENDER = "sender"


@dataclass(eq=False)
class _Peer:
    metadata: bytes
    uses: set[Use] = field(default_factory=set)
    ready: bool = False


class Peers:
    """All of them, by name."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._peers: dict[PeerName, _Peer] = {}

    def load(self, name: PeerName, metadata: bytes, use: Use) -> bool:
        """Returns whether the peer is loaded already; if not, `Endpoint.peer_added` will tell."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(metadata)
            self._outbox.effect(AddPeer(name, metadata))
        peer.uses.add(use)
        return peer.ready

    def added(self, name: PeerName, error: str) -> None:
        """The transport has loaded a peer, or not."""
        if error and self._peers.pop(name, None) is not None:
            self._outbox.effect(RemovePeer(name))
        elif not error and name in self._peers:
            self._peers[name].ready = True

    def close(self, name: PeerName, use: Use) -> bool:
        """Stop whatever is in flight to or from a peer, and end one use of it. Returns whether there was one."""
        peer = self._peers.get(name)
        if peer is None or use not in peer.uses:
            return False
        peer.uses.remove(use)
        self._outbox.effect(RemovePeer(name))
        if peer.uses:
            peer.ready = False
            self._outbox.effect(AddPeer(name, peer.metadata))
        else:
            del self._peers[name]
        return True
