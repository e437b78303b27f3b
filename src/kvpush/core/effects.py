"""What an endpoint wants done by its driver. Drained after each input and carried out in order."""

import msgspec

from kvpush.core.ids import Address, LinkId, OpId, PeerName
from kvpush.core.planner import Plan


class OpenLink(msgspec.Struct, frozen=True, tag=True):
    """Open a control connection and call it `link`."""

    link: LinkId
    address: Address


class CloseLink(msgspec.Struct, frozen=True, tag=True):
    """Forget a control connection, ours or accepted."""

    link: LinkId


class TrustLink(msgspec.Struct, frozen=True, tag=True):
    """A peer that we know is at the other end of an accepted control connection: listen to all that it says. Others
    need not be listened to for long."""

    link: LinkId


class SendFrame(msgspec.Struct, frozen=True, tag=True):
    """Send one encoded message. May be lost; may never block."""

    link: LinkId
    frame: bytes


class AddPeer(msgspec.Struct, frozen=True, tag=True):
    """Load a peer's transport metadata; answered by `Endpoint.peer_added`."""

    peer: PeerName
    metadata: bytes


class RemovePeer(msgspec.Struct, frozen=True, tag=True):
    """Close the way in and out of a peer: drop its agent, handles and mappings."""

    peer: PeerName


class Post(msgspec.Struct, frozen=True, tag=True):
    """Post one WRITE if `Endpoint.may_post` still says so; its end is reported with `Endpoint.op_finished`. `notice`
    travels with the data."""

    op: OpId
    peer: PeerName
    plan: Plan
    notice: bytes


class PostRead(msgspec.Struct, frozen=True, tag=True):
    """Post one READ into the local side of `plan`, on the same terms."""

    op: OpId
    peer: PeerName
    plan: Plan


Effect = OpenLink | CloseLink | TrustLink | SendFrame | AddPeer | RemovePeer | Post | PostRead
