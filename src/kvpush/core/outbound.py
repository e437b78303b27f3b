"""The senders that we talk to: the receiver's half of each peer relation.

A session is one target (address and expected engine). It opens a link, says hello until it is welcomed, and
then beats for all its keys at once. Silence or a refusal loses it; the next use begins a new one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvpush.core.config import ProtocolConfig
from kvpush.core.effects import CloseLink, OpenLink
from kvpush.core.errors import Reason
from kvpush.core.events import PeerChanged
from kvpush.core.ids import EngineId, Epoch, Key, LinkId, Target
from kvpush.core.messages import MAX_KEYS, Heartbeat, Hello, Message
from kvpush.core.outbox import Outbox

_NOBODY = Epoch(0)


class SessionState(StrEnum):
    """How far a session is."""

    CONNECTING = "connecting"
    READY = "ready"


@dataclass(eq=False)
class Session:
    """One target. `epoch` is the process that welcomed us, `clock` the latest that it told us of its own;
    `next_beat` is the next hello or heartbeat. While CONNECTING it has until `welcome_by`, and if it is lost then, the
    reason is `suspicion`."""

    target: Target
    link: LinkId
    welcome_by: float
    next_beat: float
    last_heard: float
    clock: float = 0.0
    state: SessionState = SessionState.CONNECTING
    epoch: Epoch = _NOBODY
    engine_id: EngineId | None = None
    suspicion: Reason = Reason.PEER_HANDSHAKE

    @property
    def name(self) -> str:
        """For logs and records."""
        return f"{self.engine_id or self.target.engine_id or '?'}@{self.target.address}"


class Outbound:
    """All sessions, by target."""

    def __init__(self, config: ProtocolConfig, hello: Callable[[Target], Hello], outbox: Outbox) -> None:
        self._config = config
        self._hello = hello
        self._outbox = outbox
        self._sessions: dict[Target, Session] = {}
        self._links = 0

    def session(self, target: Target, now: float) -> Session:
        """The session for a target, begun when there is none. One not heard of lately says hello again
        first, so that a restarted sender is noticed before anything is registered with it."""
        session = self._sessions.get(target)
        if session is None:
            return self._begin(target, now)
        if session.state is SessionState.READY and now >= session.last_heard + 2 * self._config.heartbeat_s:
            self._doubt(session, Reason.PEER_SILENT, now + self._config.connect_timeout_s, now)
        return session

    def broken(self, session: Session, now: float) -> None:
        """Its connection has ended: that of a process that lives is back in a moment."""
        if session.state is SessionState.READY:
            self._doubt(session, Reason.PEER_LOST, now + self._config.doubt_s, now)

    def _doubt(self, session: Session, suspicion: Reason, welcome_by: float, now: float) -> None:
        """Let a sender that we know prove that it is still there, by a welcome. Until then it is told nothing."""
        session.state = SessionState.CONNECTING
        session.suspicion, session.welcome_by = suspicion, welcome_by
        self._say_hello(session, now)

    def _begin(self, target: Target, now: float) -> Session:
        self._links += 1
        session = Session(target, LinkId(self._links), now + self._config.connect_timeout_s, now, now)
        self._sessions[target] = session
        self._outbox.effect(OpenLink(session.link, target.address))
        self._say_hello(session, now)
        return session

    def _say_hello(self, session: Session, now: float) -> None:
        self._outbox.send(session.link, _NOBODY, self._hello(session.target))
        session.next_beat = now + self._config.retry_s

    def on_link(self, link: LinkId) -> Session | None:
        """The session that uses a link."""
        return next((session for session in self._sessions.values() if session.link == link), None)

    def get(self, target: Target) -> Session | None:
        """The session for a target, if there is one."""
        return self._sessions.get(target)

    def welcome(self, session: Session, epoch: Epoch, engine_id: EngineId, now: float) -> None:
        """A sender has welcomed us: the same process as before, if there was one before."""
        if session.state is SessionState.CONNECTING:
            session.state = SessionState.READY
            session.epoch, session.engine_id = epoch, engine_id
            session.suspicion = Reason.PEER_SILENT
            session.next_beat = now
            self._outbox.event(PeerChanged(session.name, True, Reason.OK))

    def tell(self, session: Session, message: Message) -> None:
        """Send a message to the process that welcomed us."""
        self._outbox.send(session.link, session.epoch, message)

    def beat(self, session: Session, keys: list[Key], now: float) -> None:
        """Renew the leases of `keys`, all that this session still cares for."""
        for first in range(0, max(len(keys), 1), MAX_KEYS):
            self.tell(session, Heartbeat(session.clock, tuple(keys[first : first + MAX_KEYS])))
        session.next_beat = now + self._config.heartbeat_s

    def due(self, now: float) -> list[Session]:
        """Sessions that should be lost, or should beat."""
        return [s for s in self._sessions.values() if now >= min(s.next_beat, self.lost_at(s))]

    def lost_at(self, session: Session) -> float:
        """When a session is lost unless something is heard."""
        if session.state is SessionState.CONNECTING:
            return session.welcome_by
        return session.last_heard + self._config.peer_timeout_s

    def repeat_hello(self, session: Session, now: float) -> None:
        """Say hello again, for the first may have been lost."""
        self._say_hello(session, now)

    def forget(self, session: Session, reason: Reason, detail: str) -> None:
        """End a session. Only a sender that had welcomed us is lost: the others are attempts, repeated while blocks are
        in quarantine, and what waited for one of them says so itself."""
        del self._sessions[session.target]
        self._outbox.effect(CloseLink(session.link))
        self._outbox.event(PeerChanged(session.name, False, reason, detail))
        if session.epoch != _NOBODY:
            self._outbox.count("peer_lost", reason)

    def deadlines(self) -> Iterable[float]:
        """When each session next beats or is lost."""
        return (min(session.next_beat, self.lost_at(session)) for session in self._sessions.values())
