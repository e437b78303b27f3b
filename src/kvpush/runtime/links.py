"""The control links that peers have opened to us: ZeroMQ's identities as negative `LinkId`s.

A link lives as long as its TCP connection. A ROUTER does not say when one of its peers has gone, but its monitor
names the file descriptor of each connection that ends, and each message carries that of the one it came by.
"""

from dataclasses import dataclass

from kvpush.core.ids import LinkId


@dataclass(eq=False)
class _Inbound:
    """`trusted` once the endpoint knows its peer; `frames`: how many have come before that."""

    link: LinkId
    identity: bytes
    fd: int
    trusted: bool = False
    frames: int = 0


class InboundLinks:
    """At most `limit` accepted links; the stranger that has been silent longest makes room for a new one, or if there
    is none, the peer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last = 0
        self._strangers: dict[bytes, _Inbound] = {}  # least recently heard first
        self._peers: dict[bytes, _Inbound] = {}  # the same, of those that are trusted
        self._by_link: dict[LinkId, _Inbound] = {}
        self._by_fd: dict[int, _Inbound] = {}

    def __len__(self) -> int:
        return len(self._by_link)

    def heard(self, identity: bytes) -> LinkId | None:
        """The link of a peer that has just sent something, None for a new peer."""
        for known in (self._peers, self._strangers):
            inbound = known.pop(identity, None)
            if inbound is not None:
                known[identity] = inbound
                return inbound.link
        return None

    def trust(self, link: LinkId) -> None:
        """The endpoint knows who is there; ignored for links that are gone."""
        inbound = self._by_link.get(link)
        if inbound is not None and not inbound.trusted:
            inbound.trusted = True
            self._peers[inbound.identity] = self._strangers.pop(inbound.identity)

    def is_trusted(self, link: LinkId) -> bool:
        """Whether the endpoint knows who is there."""
        inbound = self._by_link.get(link)
        return inbound is not None and inbound.trusted

    def count_frame(self, link: LinkId) -> int:
        """One more frame of a stranger; how many there have been."""
        inbound = self._by_link[link]
        inbound.frames += 1
        return inbound.frames

    def make_room(self, fd: int) -> list[LinkId]:
        """Forget who is in the way of a new peer on connection `fd`; says which links this ends."""
        displaced = [self._by_fd[fd]] if fd in self._by_fd else []
        if not displaced and len(self._by_link) >= self._limit:
            displaced = [next(iter((self._strangers or self._peers).values()))]
        for inbound in displaced:
            self.forget(inbound.link)
        return [inbound.link for inbound in displaced]

    def accept(self, identity: bytes, fd: int) -> LinkId:
        """Allot a link to a new peer; `make_room` comes first."""
        self._last -= 1
        inbound = _Inbound(LinkId(self._last), identity, fd)
        self._strangers[identity] = self._by_link[inbound.link] = self._by_fd[fd] = inbound
        return inbound.link

    def identity(self, link: LinkId) -> bytes | None:
        """Where to send what is meant for `link`, None when it is gone."""
        inbound = self._by_link.get(link)
        return inbound.identity if inbound else None

    def fd(self, link: LinkId) -> int | None:
        """The TCP connection of a link, None when it is gone."""
        inbound = self._by_link.get(link)
        return inbound.fd if inbound else None

    def on_connection(self, fd: int) -> LinkId | None:
        """The link that lives on the TCP connection `fd`, if any."""
        inbound = self._by_fd.get(fd)
        return inbound.link if inbound else None

    def forget(self, link: LinkId) -> None:
        """Drop a link; unknown ones are ignored."""
        inbound = self._by_link.pop(link, None)
        if inbound is not None:
            del (self._peers if inbound.trusted else self._strangers)[inbound.identity]
            del self._by_fd[inbound.fd]
