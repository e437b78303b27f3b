"""The senders that we talk to: the receiver's half of each peer relation.

A session is one target (address and expected engine). It opens a link, says hello until it is welcomed, and
then beats for all its keys at once. Silence or a refusal loses it; the next use begins a new one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec.structs import replace

from kvpush.core.config import ProtocolConfig
from kvpush.core.effects import CloseLink, OpenLink
from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.events import ModeChosen, PeerChanged
from kvpush.core.ids import EngineId, Epoch, Key, LinkId, PeerName, Target
from kvpush.core.layout import check_layout, first_difference
from kvpush.core.messages import MAX_KEYS, Heartbeat, Hello, Message, Opened, Welcome
from kvpush.core.mode import Mode, Rates
from kvpush.core.outbox import Outbox
from kvpush.core.peers import Peers, Use

_NOBODY = Epoch(0)


class SessionState(StrEnum):
    """How far a session is."""

    CONNECTING = "connecting"
    READY = "ready"


@dataclass(eq=False)
class Session:
    """One target. `modes` are those that both of us take part in; a sender that can be read has `memory`, which the
    transport knows as `peer` once it is to be read, and `readable` when that is loaded.
    `epoch` is the process that welcomed us, `clock` the latest that it told us of its own;
    `next_beat` is the next hello or heartbeat. While CONNECTING it has until `welcome_by`, and if it is lost then, the
    reason is `suspicion`; `hello_pause_s` is how long the next hello is waited for."""

    target: Target
    link: LinkId
    welcome_by: float
    next_beat: float
    last_heard: float
    hello_pause_s: float
    clock: float = 0.0
    state: SessionState = SessionState.CONNECTING
    epoch: Epoch = _NOBODY
    engine_id: EngineId | None = None
    suspicion: Reason = Reason.PEER_HANDSHAKE
    modes: tuple[Mode, ...] = ()
    memory: Opened | None = None
    peer: PeerName | None = None
    readable: bool = False
    rates: Rates = field(default_factory=Rates)

    @property
    def name(self) -> str:
        """For logs and records."""
        return f"{self.engine_id or self.target.engine_id or '?'}@{self.target.address}"


class Outbound:
    """All sessions, by target."""

    def __init__(self, config: ProtocolConfig, us: Hello, peers: Peers, outbox: Outbox) -> None:
        """`us`: the hello, but for whom it is meant for."""
        self._config = config
        self._us = us
        self._peers = peers
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
        session.hello_pause_s = self._config.retry_s
        self._say_hello(session, now)

    def _begin(self, target: Target, now: float) -> Session:
        self._links += 1
        welcome_by = now + self._config.connect_timeout_s
        session = Session(target, LinkId(self._links), welcome_by, now, now, self._config.retry_s)
        self._sessions[target] = session
        self._outbox.effect(OpenLink(session.link, target.address))
        self._say_hello(session, now)
        return session

    def _say_hello(self, session: Session, now: float) -> None:
        """Each time wait longer for the answer: hellos are large, and who is slow to answer has enough to do."""
        self._outbox.send(session.link, _NOBODY, replace(self._us, wants=session.target.engine_id))
        session.next_beat = now + session.hello_pause_s
        session.hello_pause_s = min(2 * session.hello_pause_s, max(self._config.retry_s, self._config.heartbeat_s))

    def on_link(self, link: LinkId) -> Session | None:
        """The session that uses a link."""
        return next((session for session in self._sessions.values() if session.link == link), None)

    def get(self, target: Target) -> Session | None:
        """The session for a target, if there is one."""
        return self._sessions.get(target)

    def welcome(self, session: Session, epoch: Epoch, message: Welcome, now: float) -> None:
        """A sender has welcomed us: the same process as before, if there was one before. Raises `RemoteProtocolError`
        when the memory that it opens to us is not what we could read."""
        if message.memory is not None:
            self._check_memory(message.memory)
        if session.state is SessionState.CONNECTING:
            session.state = SessionState.READY
            session.epoch, session.engine_id = epoch, message.engine_id
            session.modes, session.memory = message.modes, message.memory
            session.suspicion = Reason.PEER_SILENT
            session.next_beat = now
            self._outbox.event(PeerChanged(session.name, True, Reason.OK))

    def _check_memory(self, memory: Opened) -> None:
        check_layout(memory.layout)
        difference = first_difference(self._us.layout, memory.layout)
        if difference is not None:
            detail = f"the sender has {difference.theirs}, the receiver {difference.ours}"
            raise RemoteProtocolError(Reason.INCOMPATIBLE, detail, difference.field)

    def open_memory(self, session: Session) -> None:
        """Have the transport load a sender that is to be read; `peer_added` tells when it has."""
        if session.memory is not None and session.peer is None:
            rank = session.memory.layout.tp_rank
            session.peer = PeerName(f"{session.engine_id}/{rank}@{session.epoch:x}")
            session.readable = self._peers.load(session.peer, session.memory.metadata, Use.SENDER)

    def loaded(self, peer: PeerName, error: str) -> Session | None:
        """The transport has loaded a sender, or says why not. Returns its session, if there is one."""
        session = self._read_by(peer)
        if session is not None:
            session.readable = not error
            if error:  # the next transfer tries again
                session.peer = None
        return session

    def closed(self, peer: PeerName) -> Session | None:
        """The transport has let go of a sender, and loads it again. Returns its session, if there is one."""
        session = self._read_by(peer)
        if session is not None:
            session.readable = False
        return session

    def _read_by(self, peer: PeerName) -> Session | None:
        return next((session for session in self._sessions.values() if session.peer == peer), None)

    def measured(self, session: Session, mode: Mode, nbytes: int, seconds: float) -> None:
        """A transfer with a sender has taken so long on the wire."""
        rates = session.rates
        if rates.note(mode, nbytes, seconds) and len(session.modes) > 1:
            chosen = rates.choose(session.modes, nbytes)
            push, pull = (rates.best[each] for each in Mode)
            self._outbox.event(ModeChosen(session.name, chosen, push, pull))

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

    def overslept(self, seconds: float) -> None:
        """We have not listened for so long. Who is to answer a hello does not lose that time: our hello may have left,
        or its answer come, at the end of it only."""
        for session in self._sessions.values():
            if session.state is SessionState.CONNECTING:
                session.welcome_by += seconds

    def forget(self, session: Session, reason: Reason, detail: str) -> None:
        """End a session. Only a sender that had welcomed us is lost: the others are attempts, repeated while blocks are
        in quarantine, and what waited for one of them says so itself."""
        del self._sessions[session.target]
        if session.peer is not None:
            self._peers.close(session.peer, Use.SENDER)
        self._outbox.effect(CloseLink(session.link))
        self._outbox.event(PeerChanged(session.name, False, reason, detail))
        if session.epoch != _NOBODY:
            self._outbox.count("peer_lost", reason)

    def deadlines(self) -> Iterable[float]:
        """When each session next beats or is lost."""
        return (min(session.next_beat, self.lost_at(session)) for session in self._sessions.values())
