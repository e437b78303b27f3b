"""The receivers that have said hello to us: the sender's half of each peer relation.

A caller is one process (its epoch). It is known by the epoch in every frame, so that a link that breaks
and comes back is the same caller. It may have several, one for each name that it knows us by: replies go to the one it
was last heard on, and it is doubted when none is left.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvpush.core.config import ProtocolConfig
from kvpush.core.effects import CloseLink, TrustLink
from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.events import PeerChanged
from kvpush.core.ids import EngineId, Epoch, LinkId, PeerName
from kvpush.core.layout import Layout, check_layout, first_difference
from kvpush.core.messages import Hello, Message, Opened, Refuse, Welcome
from kvpush.core.mode import MEASURED_BYTES, Mode, agree, in_words
from kvpush.core.outbox import Outbox
from kvpush.core.peers import Peers, Use

MAX_LOADING = 8
"""Callers that are being loaded at a time. The hello of another one waits for its repetition: each keeps the transfer
thread from its other work for a while."""
MAX_CALLERS = 1024

_MAX_REFUSALS = 64


@dataclass(eq=False)
class Caller:
    """One receiver process. `ready` once the transport has loaded it. `modes` are those that both of us take part in.
    `link`: where it was last heard on; `spare`: others of its that are up. `broken_at`: when the last of them ended.
    `pace`: bytes per second of what is written to it, once that has been seen. `refused`: how many of its messages in a
    row have been."""

    epoch: Epoch
    engine_id: EngineId
    name: PeerName
    link: LinkId
    layout: Layout
    modes: tuple[Mode, ...]
    last_heard: float
    ready: bool = False
    spare: tuple[LinkId, ...] = ()
    broken_at: float | None = None
    pace: float | None = None
    refused: int = 0

    def note_pace(self, nbytes: int, seconds: float) -> None:
        """So much was written to it in so long; the latest counts for a quarter."""
        if nbytes < MEASURED_BYTES or seconds <= 0:
            return
        seen = nbytes / seconds
        self.pace = seen if self.pace is None else 0.75 * self.pace + 0.25 * seen

    def heard(self, link: LinkId, now: float) -> None:
        """It lives, and is to be answered on this link."""
        if link != self.link:
            up = self.spare if self.broken_at is not None else (*self.spare, self.link)
            self.link, self.spare = link, tuple(other for other in up if other != link)
        self.last_heard = now
        self.broken_at = None

    def broken(self, link: LinkId, now: float) -> None:
        """A link has ended, of this caller or of another."""
        if link in self.spare:
            self.spare = tuple(other for other in self.spare if other != link)
        elif link == self.link and self.spare:
            *others, self.link = self.spare
            self.spare = tuple(others)
        elif link == self.link and self.broken_at is None:
            self.broken_at = now

    def lost_at(self, config: ProtocolConfig) -> float:
        """When it is lost unless something is heard of it."""
        silent = self.last_heard + config.peer_timeout_s
        return silent if self.broken_at is None else min(silent, self.broken_at + config.doubt_s)

    @property
    def suspicion(self) -> Reason:
        """Why, if it is lost."""
        return Reason.PEER_SILENT if self.broken_at is None else Reason.PEER_LOST


class Inbound:
    """All callers, by epoch."""

    def __init__(self, config: ProtocolConfig, us: Hello, peers: Peers, outbox: Outbox) -> None:
        """`us`: what we say of ourselves when it is us who calls."""
        self._config = config
        self._us = us
        self._peers = peers
        self._outbox = outbox
        self._callers: dict[Epoch, Caller] = {}

    def get(self, epoch: Epoch) -> Caller | None:
        """The caller with this epoch, if it may register."""
        caller = self._callers.get(epoch)
        return caller if caller is not None and caller.ready else None

    def heard(self, epoch: Epoch, link: LinkId, now: float) -> Caller | None:
        """A frame of this process arrived on `link`."""
        caller = self._callers.get(epoch)
        if caller is not None:
            if caller.link != link and caller.ready:
                self._outbox.effect(TrustLink(link))
            caller.heard(link, now)
        return caller

    def broken(self, link: LinkId, now: float) -> None:
        """An accepted link has ended: a receiver that lives comes back by another in a moment."""
        for caller in self._callers.values():
            caller.broken(link, now)

    def hello(self, epoch: Epoch, link: LinkId, hello: Hello, now: float) -> list[Caller]:
        """Take a hello that has been checked; returns callers that it replaces (an earlier life of the same engine's
        rank). Raises RemoteProtocolError when there is no room for another caller."""
        known = self._callers.get(epoch)
        if known is not None:
            if known.ready:
                self._welcome(known, now)
            return []
        self._check_room(link)
        name = PeerName(f"{hello.engine_id}/{hello.layout.tp_rank}@{epoch:x}")
        caller = Caller(epoch, hello.engine_id, name, link, hello.layout, agree(self._us.modes, hello.modes), now)
        replaced = [old for old in self._callers.values() if _same_place(old, caller)]
        self._callers[epoch] = caller
        if self._peers.load(name, hello.metadata, Use.RECEIVER):
            self._open(caller, now)
        return replaced

    def check(self, hello: Hello) -> None:
        """Raises RemoteProtocolError when the two cannot work together, or it is meant for another engine."""
        if hello.wants is not None and hello.wants != self._us.engine_id:
            detail = f"wrong engine: this is {self._us.engine_id}, the message was meant for {hello.wants}"
            raise RemoteProtocolError(Reason.WRONG_ENGINE, detail, "wants")
        check_layout(hello.layout)
        difference = first_difference(self._us.layout, hello.layout)
        if difference is not None:
            detail = f"the sender has {difference.ours}, the receiver {difference.theirs}"
            raise RemoteProtocolError(Reason.INCOMPATIBLE, detail, difference.field)
        if not agree(self._us.modes, hello.modes):
            detail = (
                f"the sender can {in_words(self._us.modes)}, the receiver {in_words(hello.modes)}. "
                "Set the same mode for both, or auto for one of them"
            )
            raise RemoteProtocolError(Reason.INCOMPATIBLE, detail, "mode")

    def _check_room(self, link: LinkId) -> None:
        if self._by(link) is not None:
            self._outbox.effect(CloseLink(link))
            raise RemoteProtocolError(Reason.BAD_MESSAGE, "another process has said hello on this link", "source")
        if len(self._callers) >= MAX_CALLERS:
            raise RemoteProtocolError(Reason.PEER_HANDSHAKE, f"{MAX_CALLERS} receivers are known already", "source")

    def _by(self, link: LinkId) -> Caller | None:
        return next((one for one in self._callers.values() if link == one.link or link in one.spare), None)

    def is_loading(self) -> bool:
        """Whether it is too early for a hello of someone new."""
        return sum(not caller.ready for caller in self._callers.values()) >= MAX_LOADING

    def refused(self, link: LinkId) -> None:
        """A message was refused. Who says nothing else is a stranger again, even if it has said a good hello."""
        caller = self._by(link)
        if caller is not None:
            caller.refused += 1
            if caller.refused == _MAX_REFUSALS:
                caller.refused = 0
                self._outbox.effect(CloseLink(link))

    def peer_added(self, name: PeerName, error: str, now: float) -> None:
        """The transport has loaded a caller, or not."""
        caller = next((caller for caller in self._callers.values() if caller.name == name), None)
        if caller is None:
            return
        if error:
            self.tell(caller, Refuse(Reason.PEER_HANDSHAKE, "metadata", error[:1000]))
            self.forget(caller, Reason.PEER_HANDSHAKE, error)
        elif not caller.ready:
            self._open(caller, now)

    def _open(self, caller: Caller, now: float) -> None:
        caller.ready = True
        self._outbox.effect(TrustLink(caller.link))
        self._outbox.event(PeerChanged(caller.name, True, Reason.OK))
        self._welcome(caller, now)

    def _welcome(self, caller: Caller, now: float) -> None:
        readable = Mode.PULL in caller.modes
        memory = Opened(self._us.layout, self._us.metadata) if readable else None
        self.tell(caller, Welcome(self._us.engine_id, now, caller.modes, memory))

    def tell(self, caller: Caller, message: Message) -> None:
        """Send a message to a caller."""
        self._outbox.send(caller.link, caller.epoch, message)

    def silent(self, now: float) -> list[Caller]:
        """Callers not heard of for too long; the endpoint ends their transfers and forgets them."""
        return [caller for caller in self._callers.values() if now >= caller.lost_at(self._config)]

    def forget(self, caller: Caller, reason: Reason, detail: str = "") -> bool:
        """Close the way to a caller, if that has not been done: its agent, handles and mappings go with it. Returns
        whether that stops what else is under way between us."""
        if self._callers.get(caller.epoch) is not caller:
            return False
        del self._callers[caller.epoch]
        closed = self._peers.close(caller.name, Use.RECEIVER)
        for link in (caller.link, *caller.spare):
            self._outbox.effect(CloseLink(link))
        self._outbox.event(PeerChanged(caller.name, False, reason, detail))
        self._outbox.count("peer_lost", reason)
        return closed

    def deadlines(self) -> Iterable[float]:
        """When each caller will have been silent for too long."""
        return (caller.lost_at(self._config) for caller in self._callers.values())


def _same_place(old: Caller, new: Caller) -> bool:
    return old.engine_id == new.engine_id and old.layout.tp_rank == new.layout.tp_rank
