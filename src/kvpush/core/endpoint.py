"""One worker rank's side of the protocol, sending and receiving: sans-IO.

Feed it commands, frames, completions and time; drain effects and events after each input. It reads no
clock: `now` is the driver's monotonic clock in seconds, and never goes back. Leases that end by `now` end
before the input itself, so that none is ever judged by a lease that has ended. Peers are judged by `tick` alone,
which a driver calls when it has read what they have said: a thread that has stood still must not take its own
silence for theirs.
"""

from collections.abc import Sequence

from kvpush.core.effects import Effect
from kvpush.core.engine_side import EngineSide
from kvpush.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from kvpush.core.events import Event
from kvpush.core.ids import Epoch, LinkId, OpId, PeerName
from kvpush.core.inbound import Caller
from kvpush.core.messages import (
    Accepted,
    Ask,
    Beat,
    Begun,
    Cancel,
    Confirmed,
    Drained,
    Draining,
    Dropped,
    Failed,
    Frame,
    Heartbeat,
    Hello,
    Holds,
    Interest,
    Offer,
    Refuse,
    Register,
    Released,
    Welcome,
    Writing,
    Written,
    decode_frame,
    decode_notice,
)
from kvpush.core.mode import Mode
from kvpush.core.outbound import Session, SessionState

_ANYONE = Epoch(0)


class Endpoint(EngineSide):
    """Joins the parts: who calls us (inbound), what we send (sender) and keep in case that it is asked for (keeper),
    whom we call (outbound), what we receive (receiver) and would like to (inquirer)."""

    # the control channel --------------------------------------------------------------------------------
    def frame_received(self, link: LinkId, frame: bytes, now: float) -> None:
        """Take one control message. Never raises: what is wrong with it is counted, and answered where the
        sender of it can use the answer. An answer is never answered."""
        self.expire(now)
        source, key = _ANYONE, None
        try:
            parsed = decode_frame(frame)
            source, key = parsed.source, getattr(parsed.message, "key", None)
            self._check_destination(parsed)
            if link > 0:
                self._from_sender(link, parsed, now)
            else:
                self._from_receiver(link, parsed, now)
        except RemoteProtocolError as error:
            self._outbox.count("refused", error.reason)
            if link < 0:
                self._inbound.refused(link)
                self._outbox.send(link, source, Refuse(error.reason, error.field[:1000], error.detail[:1000], key))
        except LocalProtocolError:
            # the table has no entry for what a peer said: it is out of order, and changes nothing
            self._outbox.count("out_of_order", Reason.BAD_MESSAGE)
        self._finish_stop(now)

    def _check_destination(self, frame: Frame) -> None:
        if frame.destination == self._outbox.epoch:
            return
        if frame.destination == _ANYONE and isinstance(frame.message, Hello | Refuse):
            return
        detail = f"wrong engine: the message was meant for another process; this is {self._engine_id}"
        raise RemoteProtocolError(Reason.WRONG_ENGINE, detail, "destination")

    def _from_receiver(self, link: LinkId, frame: Frame, now: float) -> None:
        message = frame.message
        if isinstance(message, Hello):
            self._greeted(link, frame.source, message, now)
            return
        caller = self._inbound.heard(frame.source, link, now)
        if not isinstance(message, Interest | Register | Cancel | Released | Ask | Heartbeat):
            raise RemoteProtocolError(Reason.BAD_MESSAGE, f"{type(message).__name__} is not for a sender", "message")
        if caller is None or not caller.ready:
            raise RemoteProtocolError(Reason.PEER_LOST, "this receiver is not known (any more); say hello", "source")
        caller.refused = 0
        match message:
            case Interest():
                self._sender.watch(caller, message.key, now)
            case Register():
                self._keeper.registered(caller, message, now)
                self._sender.register(caller, message, now)
            case Cancel():
                self._keeper.surrender(message.key, now)
                self._sender.cancel(caller, message.key, message.reason, now)
            case Released():
                self._sender.released(caller, message.key, now)
            case Ask():
                self._keeper.ask(caller, message, now)
            case Heartbeat():
                self._keeper.renew(message.keys, now)
                self._inbound.tell(caller, self._sender.heartbeat(caller, message.keys, message.echo, now))

    def _greeted(self, link: LinkId, source: Epoch, hello: Hello, now: float) -> None:
        self._inbound.check(hello)  # before anything is believed that it came with
        if self._inbound.heard(source, link, now) is None and self._inbound.is_loading():
            self._outbox.count("hello_put_off", Reason.OK)
            return
        for replaced in self._inbound.hello(source, link, hello, now):
            self._lose_caller(replaced, Reason.PEER_RESTARTED, now)

    def _from_sender(self, link: LinkId, frame: Frame, now: float) -> None:
        session = self._outbound.on_link(link)
        if session is None:
            self._outbox.count("late_message", Reason.PEER_LOST)
            return
        message = frame.message
        if session.epoch not in (_ANYONE, frame.source):
            self._lose_session(session, Reason.PEER_RESTARTED, "another process answers at this address", now)
            return
        if session.epoch == _ANYONE and not isinstance(message, Welcome | Refuse):
            raise RemoteProtocolError(Reason.BAD_MESSAGE, f"{type(message).__name__} before a welcome", "message")
        session.last_heard = now
        match message:
            case Welcome():
                self._welcomed(session, frame.source, message, now)
            case Refuse():
                self._refused(session, message, now)
            case Begun():
                self._receiver.begun(message.key, session, now)
            case Accepted():
                self._receiver.accepted(message.key, session, now)
            case Offer():
                self._receiver.offered(message, session, now)
            case Confirmed():
                self._receiver.confirmed(message.key, session, now)
            case Writing():
                self._receiver.writing(message.key, session)
            case Draining():
                self._receiver.draining(message.key, session, now)
            case Written():
                self._outbound.measured(session, Mode.PUSH, message.nbytes, message.wire_s)
                self._receiver.written(message.key, session, now)
            case Failed():
                self._receiver.failed(message.key, session, message.reason, message.detail, now)
            case Dropped() | Drained():
                self._receiver.released(message.key, session, now)
            case Holds():
                self._inquirer.answered(message.key, session, message.tokens)
            case Beat():
                session.clock = max(session.clock, message.clock)
                self._receiver.beat(message, session, now)
            case _:
                detail = f"{type(message).__name__} is not for a receiver"
                raise RemoteProtocolError(Reason.BAD_MESSAGE, detail, "message")

    def _welcomed(self, session: Session, epoch: Epoch, message: Welcome, now: float) -> None:
        try:
            self._outbound.welcome(session, epoch, message, now)
        except RemoteProtocolError as error:
            self._lose_session(session, error.reason, str(error), now)
            raise
        session.clock = max(session.clock, message.clock)
        self._receiver.session_ready(session, now)
        self._inquirer.session_ready(session, now)

    def _refused(self, session: Session, message: Refuse, now: float) -> None:
        """A refusal about one transfer ends that; one about us ends the session."""
        detail = f"{message.field}: {message.detail}" if message.field else message.detail
        if message.key is not None and message.reason not in (Reason.PEER_LOST, Reason.WRONG_ENGINE):
            self._inquirer.end(message.key)
            self._receiver.failed(message.key, session, message.reason, detail, now)
        else:
            self._lose_session(session, message.reason, detail, now)

    def _lose_session(self, session: Session, reason: Reason, detail: str, now: float) -> None:
        self._receiver.session_lost(session, reason, detail, now)
        self._inquirer.session_lost(session)
        self._outbound.forget(session, reason, detail)

    def link_lost(self, link: LinkId, now: float) -> None:
        """A control connection broke. The channel reconnects by itself and lost frames are repeated, but the peer
        has to prove that it is still there before it is told of any more blocks."""
        self.expire(now)
        self._inbound.broken(link, now)
        session = self._outbound.on_link(link)
        if session is not None:
            self._outbound.broken(session, now)

    def link_refused(self, link: LinkId, now: float) -> None:
        """A link that we opened can never stand: its address is none, or the peer has another secret."""
        self.expire(now)
        session = self._outbound.on_link(link)
        if session is not None:
            self._lose_session(session, Reason.PEER_HANDSHAKE, "the control link was refused", now)
            self._finish_stop(now)

    # the transport --------------------------------------------------------------------------------------
    def peer_added(self, peer: PeerName, error: str, now: float) -> None:
        """The transport has loaded a peer, or says why not ("" is success)."""
        self.expire(now)
        self._peers.added(peer, error)
        self._inbound.peer_added(peer, error, now)
        self._receiver.peer_added(peer, error, now)

    def may_post(self, op: OpId, now: float) -> bool:
        """To be asked right before a `Post` is carried out: it may have waited in the driver's queue while its
        transfer was cancelled or its lease ended (R2). If not, it has to be reported as finished with an error."""
        return self._sender.may_post(op, now) if op > 0 else self._receiver.may_post(op)

    def op_finished(self, op: OpId, error: str, now: float) -> None:
        """A posted operation has stopped, or could not be posted; "" is success."""
        if op > 0:
            self._sender.op_finished(op, error, now)
        else:
            self._receiver.op_finished(op, error, now)
        self._finish_stop(now)

    def notice_received(self, notice: bytes, now: float) -> None:
        """A notice arrived on the data plane. Never raises."""
        try:
            parsed = decode_notice(notice)
            if parsed.destination != self._outbox.epoch:
                raise RemoteProtocolError(Reason.WRONG_ENGINE, "a notice for another process", "destination")
            self._receiver.noticed(parsed, now)
        except RemoteProtocolError as error:
            self._outbox.count("refused", error.reason)
        self._finish_stop(now)

    # time -----------------------------------------------------------------------------------------------
    def expire(self, now: float) -> None:
        """Let the time pass that others rely on, whatever we have or have not heard: leases end, and what is in flight
        too long after them is given up, with the way to its receiver."""
        for stuck in self._sender.tick(now):
            self._lose_caller(stuck, Reason.TRANSPORT, now)
        self._keeper.tick(now)

    def tick(self, now: float) -> None:
        """Let time pass: everything due by `now` happens. To be called when everything has been read that had arrived
        a moment ago."""
        self.expire(now)
        for unreadable in self._receiver.tick(now):
            detail = f"reads from {unreadable.name} do not stop"
            self._lose_session(unreadable, Reason.TRANSPORT, detail, now)
        self._inquirer.tick(now)
        for session in self._outbound.due(now):
            self._session_due(session, now)
        for caller in self._inbound.silent(now):
            self._lose_caller(caller, caller.suspicion, now)
        self._finish_stop(now)

    def overslept(self, seconds: float) -> None:
        """The driver has stood still for so long when it should have run."""
        self._outbound.overslept(seconds)

    def _lose_caller(self, caller: Caller, reason: Reason, now: float) -> None:
        """End what a receiver waits for, and close the way to it."""
        self._sender.caller_lost(caller, reason, now)
        if self._inbound.forget(caller, reason):
            self._receiver.way_closed(caller.name, now)

    def _session_due(self, session: Session, now: float) -> None:
        if now >= self._outbound.lost_at(session):
            self._lose_session(session, session.suspicion, f"nothing heard from {session.name}", now)
        elif session.state is SessionState.CONNECTING:
            self._outbound.repeat_hello(session, now)
        else:
            self._outbound.beat(session, self._receiver.live_keys(session), now)

    # outputs --------------------------------------------------------------------------------------------
    def next_deadline(self) -> float | None:
        """When `tick` next has something to do; None when nothing is pending."""
        parts = (self._sender, self._keeper, self._receiver, self._inquirer)
        times = [t for part in parts if (t := part.next_deadline()) is not None]
        times += [*self._outbound.deadlines(), *self._inbound.deadlines()]
        if self._stop_by not in (None, float("inf")):
            times.append(self._stop_by)
        return min(times, default=None)

    def take_effects(self) -> Sequence[Effect]:
        """Effects since the last call, to be carried out in order."""
        return self._outbox.take_effects()

    def take_events(self) -> Sequence[Event]:
        """Events since the last call."""
        return self._outbox.take_events()

    @property
    def ops_in_flight(self) -> int:
        """Posted operations that have not finished: the transport must be polled."""
        return self._sender.ops_in_flight + self._receiver.reads_in_flight

    @property
    def notices_due(self) -> int:
        """Receives whose sender says it has written, or is writing, and prompts that are being read: poll the
        transport, which brings notices, and may not let itself be read otherwise."""
        return self._receiver.notices_due + self._sender.offers

    @property
    def transfers(self) -> int:
        """Transfers on both sides that have not ended."""
        return len(self._sender) + len(self._receiver)
