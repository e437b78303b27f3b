"""The control links that peers have opened to us: ZeroMQ's identities as negative `LinkId`s.

A link lives as long as its TCP connection. A ROUTER does not say when one of its peers has gone, but its monitor
names the file descriptor of each connection that ends, and each message carries that of the one it came by.
"""

from dataclasses import dataclass

from kvpush.core.ids import LinkId


@dataclass(frozen=True)
class _Inbound:
    link: LinkId
    identity: bytes
    fd: int


class InboundLinks:
    """At most `limit` accepted links; the one that has been silent longest makes room for a new one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last = 0
        self._by_identity: dict[bytes, _Inbound] = {}  # least recently heard first
        self._by_link: dict[LinkId, _Inbound] = {}
        self._by_fd: dict[int, _Inbound] = {}

    def __len__(self) -> int:
        return len(self._by_link)

    def heard(self, identity: bytes) -> LinkId | None:
        """The link of a peer that has just sent something, None for a new peer."""
        inbound = self._by_identity.pop(identity, None)
        if inbound is None:
            return None
        self._by_identity[identity] = inbound
        return inbound.link

    def make_room(self, fd: int) -> list[LinkId]:
        """Forget who is in the way of a new peer on connection `fd`; says which links this ends."""
        displaced = [self._by_fd[fd]] if fd in self._by_fd else []
        if not displaced and len(self._by_link) >= self._limit:
            displaced = [next(iter(self._by_identity.values()))]
        for inbound in displaced:
            self.forget(inbound.link)
        return [inbound.link for inbound in displaced]

    def accept(self, identity: bytes, fd: int) -> LinkId:
        """Allot a link to a new peer; `make_room` comes first."""
        self._last -= 1
        inbound = _Inbound(LinkId(self._last), identity, fd)
        self._by_identity[identity] = self._by_link[inbound.link] = self._by_fd[fd] = inbound
        return inbound.link

    def identity(self, link: LinkId) -> bytes | None:
        """Where to send what is meant for `link`, None when it is gone."""
        inbound = self._by_link.get(link)
        return inbound.identity if inbound else None

    def on_connection(self, fd: int) -> LinkId | None:
        """The link that lives on the TCP connection `fd`, if any."""
        inbound = self._by_fd.get(fd)
        return inbound.link if inbound else None

    def forget(self, link: LinkId) -> None:
        """Drop a link; unknown ones are ignored."""
        inbound = self._by_link.pop(link, None)
        if inbound is not None:
            del self._by_identity[inbound.identity]
            del self._by_fd[inbound.fd]
