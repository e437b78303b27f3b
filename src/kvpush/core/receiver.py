"""The receiving side: prompts whose KV is elsewhere and is wanted here. One record holds all of one transfer."""

from collections.abc import Callable

from kvpush.core.commands import Abort, Expect, Receive
from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import Ended, Outcome, ReceiveEnded
from kvpush.core.ids import Key, RequestId
from kvpush.core.layout import Layout, check_blocks
from kvpush.core.messages import Beat, Cancel, Notice, Register
from kvpush.core.outbound import Outbound, Session, SessionState
from kvpush.core.outbox import Outbox
from kvpush.core.receiving import Receiving
from kvpush.core.retired import Retired
from kvpush.core.tables import RECEIVER, Recv, RecvAction, RecvInput
from kvpush.core.timers import Timers

_NEVER = float("inf")
_LIVE = (Recv.EXPECTING, Recv.CONNECTING, Recv.REGISTERED, Recv.ACCEPTED)


class Receiver:
    """All transfers that this endpoint receives."""

    def __init__(self, config: ProtocolConfig, layout: Layout, outbound: Outbound, outbox: Outbox) -> None:
        self._config = config
        self._layout = layout
        self._outbound = outbound
        self._outbox = outbox
        self._transfers: dict[Key, Receiving] = {}
        self._retired = Retired(config.retired_memory_s, config.retired_memory_keys)
        self._noticing = 0
        self._timers: Timers[Key] = Timers(self._deadline_of)
        self._actions: dict[RecvAction, Callable[[Receiving, float], None]] = {
            RecvAction.REGISTER: self._register,
            RecvAction.CANCEL: self._cancel,
            RecvAction.FREE: self._free,
            RecvAction.QUARANTINE: self._quarantine,
            RecvAction.RETIRE: self._retire,
        }

    # our engine -----------------------------------------------------------------------------------------
    def expect(self, command: Expect, now: float) -> None:
        """A request has arrived; keep its lease alive until it has blocks."""
        self._check_new(command.key)
        transfer = Receiving(command.key, command.request_id, command.target)
        self._transfers[command.key] = transfer
        transfer.at["expected"] = now
        self._outbound.session(command.target, now)
        self._step(transfer, RecvInput.EXPECT, now)

    def receive(self, command: Receive, now: float) -> None:
        """The request has blocks: register them as soon as the sender can hear of it."""
        self._check_blocks(command)
        transfer = self._transfers.get(command.key)
        if transfer is None:
            self._check_new(command.key)
            transfer = Receiving(command.key, command.request_id, command.target)
            self._transfers[command.key] = transfer
        elif transfer.state is not Recv.EXPECTING:
            raise LocalProtocolError(f"{command.key}: Receive is not possible when {transfer.state}")
        transfer.span, transfer.blocks, transfer.holds = command.span, command.blocks, True
        transfer.at["requested"] = now
        self._step(transfer, RecvInput.RECEIVE, now)
        if transfer.end is not None:
            self._step(transfer, RecvInput.DOOMED, now)
        elif self._outbound.session(transfer.target, now).state is SessionState.READY:
            self._step(transfer, RecvInput.READY, now)

    def abort(self, command: Abort, now: float) -> None:
        """The request is gone, or needs nothing."""
        transfer = self._transfers.get(command.key)
        if transfer is None:
            return
        outcome = Outcome.DELIVERED if command.reason is Reason.NOT_NEEDED else Outcome.FAILED
        self._end_with(transfer, outcome, command.reason, "")
        self._step(transfer, RecvInput.ABORT, now)

    def stop(self, now: float) -> None:
        """Give everything up; what was registered ends when its sender has answered, or by time."""
        for transfer in list(self._transfers.values()):
            self._end_with(transfer, Outcome.FAILED, Reason.SHUTDOWN, "the receiver is stopping")
            if transfer.state is not Recv.QUARANTINED:
                self._step(transfer, RecvInput.ABORT, now)

    def _check_new(self, key: Key) -> None:
        if key in self._transfers or key in self._retired:
            raise LocalProtocolError(f"{key} has been used before; every attempt needs a key of its own")

    def _check_blocks(self, command: Receive) -> None:
        try:
            check_blocks(self._layout, command.span, command.blocks)
        except Exception as error:
            raise LocalProtocolError(f"{command.key}: {error}") from None

    # the sender -----------------------------------------------------------------------------------------
    def accepted(self, key: Key, session: Session, now: float) -> None:
        """The registration is valid."""
        transfer = self._of(key, session)
        if transfer is not None:
            transfer.at.setdefault("accepted", now)
            self._step(transfer, RecvInput.ACCEPT, now)
            if transfer.state is Recv.ACCEPTED:
                self._wait(transfer, None, transfer.at["accepted"] + self._config.transfer_s)

    def failed(self, key: Key, session: Session, reason: Reason, detail: str, now: float) -> None:
        """The sender will write no more."""
        transfer = self._of(key, session)
        if transfer is not None:
            self._end_with(transfer, Outcome.FAILED, reason, detail)
            self._step(transfer, RecvInput.FAIL, now)

    def released(self, key: Key, session: Session, now: float) -> None:
        """Dropped or Drained."""
        transfer = self._of(key, session)
        if transfer is not None:
            self._end_with(transfer, Outcome.FAILED, Reason.PREFILL_FAILED, "the sender dropped the transfer")
            self._step(transfer, RecvInput.RELEASE, now)

    def writing(self, key: Key, session: Session) -> None:
        """The sender has posted a write, which needs our transport to be polled."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.target == session.target and transfer.registered:
            self._noticing += not transfer.noticing
            transfer.writing = True

    def written(self, key: Key, session: Session, now: float) -> None:
        """The sender says that all has been written: the notices must come soon, if they have not already."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.target != session.target:
            return
        if transfer.registered and transfer.told_at is None:
            self._noticing += not transfer.noticing
            transfer.told_at = now
            self._arm(transfer)

    def beat(self, beat: Beat, session: Session, now: float) -> None:
        """Learn of answers that were lost."""
        for end in beat.ended:
            transfer = self._transfers.get(end.key)
            if transfer is None:
                continue
            if end.outcome is Outcome.DELIVERED and transfer.registered:
                self.written(end.key, session, now)
            else:
                reason = Reason.RETIRED_TRANSFER if end.outcome is Outcome.DELIVERED else end.reason
                self.failed(end.key, session, reason, "learned from a heartbeat", now)
        for key in beat.unknown:
            transfer = self._transfers.get(key)
            if transfer is not None and transfer.state is Recv.ACCEPTED:
                self._end_with(transfer, Outcome.FAILED, Reason.UNKNOWN_TRANSFER, "the sender has forgotten it")
                self._step(transfer, RecvInput.GIVE_UP, now)

    def _of(self, key: Key, session: Session) -> Receiving | None:
        """The transfer that a sender speaks of, if it is one with that sender."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.target == session.target:
            return transfer
        self._outbox.count("late_message", Reason.RETIRED_TRANSFER if key in self._retired else Reason.UNKNOWN_TRANSFER)
        return None

    def noticed(self, notice: Notice, now: float) -> None:
        """A part is in our memory."""
        transfer = self._transfers.get(notice.key)
        if transfer is None or not transfer.registered:
            known = notice.key in self._retired
            self._outbox.count("late_notice", Reason.RETIRED_TRANSFER if known else Reason.UNKNOWN_TRANSFER)
            return
        if notice.part in transfer.seen:
            self._outbox.count("late_notice", Reason.DUPLICATE_KEY)
        self._noticing += not transfer.noticing
        transfer.seen.add(notice.part)
        transfer.parts = max(transfer.parts, notice.parts)
        if transfer.complete:
            transfer.at["noticed"] = now
            self._end_with(transfer, Outcome.DELIVERED, Reason.OK, "")
            self._step(transfer, RecvInput.COMPLETE, now)

    # sessions -------------------------------------------------------------------------------------------
    def session_ready(self, session: Session, now: float) -> None:
        """A sender can be told what waited for it."""
        for transfer in self._with(session):
            self._step(transfer, RecvInput.READY, now)

    def session_lost(self, session: Session, reason: Reason, detail: str, now: float) -> None:
        """A sender is gone."""
        for transfer in self._with(session):
            self._end_with(transfer, Outcome.FAILED, reason, detail)
            told = transfer.registered or transfer.state is not Recv.CANCELLING
            self._step(transfer, RecvInput.PEER_LOST if told else RecvInput.DOOMED, now)

    def live_keys(self, session: Session) -> list[Key]:
        """The transfers whose leases this session should renew."""
        return [t.key for t in self._with(session) if t.state in _LIVE and t.end is None]

    def _with(self, session: Session) -> list[Receiving]:
        return [t for t in self._transfers.values() if t.target == session.target]

    # time -----------------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Repeat what was not answered; stop waiting for what will not come."""
        for key in self._timers.due(now):
            transfer = self._transfers[key]
            if transfer.state is Recv.QUARANTINED:
                self._step(transfer, RecvInput.SAFE, now)
            elif now >= self._noticed_by(transfer):
                self._end_with(transfer, Outcome.FAILED, Reason.NOTICE_LOST, "written, but never noticed")
                self._step(transfer, RecvInput.FAIL, now)
            elif transfer.limit_at is not None and now >= transfer.limit_at:
                self._end_with(transfer, Outcome.FAILED, *_overdue(transfer))
                self._step(transfer, RecvInput.GIVE_UP if transfer.registered else RecvInput.DOOMED, now)
            else:
                self._repeat(transfer, now)

    def next_deadline(self) -> float | None:
        """When there is next something to repeat or to give up."""
        return self._timers.earliest()

    def _deadline_of(self, key: Key) -> float | None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return None
        deadlines = [t for t in (transfer.retry_at, transfer.limit_at) if t is not None]
        earliest = min(self._noticed_by(transfer), *deadlines) if deadlines else self._noticed_by(transfer)
        return earliest if earliest < _NEVER else None

    def _noticed_by(self, transfer: Receiving) -> float:
        """When the notices must have come after the sender has said that all is written."""
        if transfer.told_at is None or transfer.state in (Recv.CANCELLING, Recv.QUARANTINED):
            return _NEVER
        return transfer.told_at + self._config.notice_grace_s

    def _wait(self, transfer: Receiving, retry_at: float | None, limit_at: float | None) -> None:
        transfer.retry_at, transfer.limit_at = retry_at, limit_at
        self._arm(transfer)

    def _arm(self, transfer: Receiving) -> None:
        deadline = self._deadline_of(transfer.key)
        if deadline is not None:
            self._timers.arm(transfer.key, deadline)

    def _repeat(self, transfer: Receiving, now: float) -> None:
        session = self._outbound.get(transfer.target)
        if session is not None and session.state is SessionState.READY:
            self._step(transfer, RecvInput.READY, now)
        else:
            self._wait(transfer, now + self._config.retry_s, transfer.limit_at)

    # the table ------------------------------------------------------------------------------------------
    def _step(self, transfer: Receiving, happened: RecvInput, now: float) -> None:
        try:
            transfer.state, actions = RECEIVER[transfer.state, happened]
        except KeyError:
            raise LocalProtocolError(f"{transfer.key}: {happened} is not possible when {transfer.state}") from None
        for action in actions:
            self._actions[action](transfer, now)

    def _end_with(self, transfer: Receiving, outcome: Outcome, reason: Reason, detail: str) -> None:
        """The first cause is the one that is reported."""
        if transfer.end is None:
            transfer.end = (outcome, reason, detail)

    def _register(self, transfer: Receiving, now: float) -> None:
        session = self._outbound.session(transfer.target, now)
        transfer.registered_at = now
        transfer.at.setdefault("registered", now)
        self._outbound.tell(session, Register(transfer.key, transfer.span, transfer.blocks, session.clock))
        limit = transfer.limit_at if transfer.limit_at is not None else now + self._config.connect_timeout_s
        self._wait(transfer, now + self._config.retry_s, limit)

    def _cancel(self, transfer: Receiving, now: float) -> None:
        """Say it if the sender can hear it, and again until it answers or the lease must have ended."""
        session = self._outbound.get(transfer.target)
        if session is None:
            self._step(transfer, RecvInput.PEER_LOST if transfer.registered else RecvInput.DOOMED, now)
            return
        if session.state is SessionState.READY:
            self._outbound.tell(session, Cancel(transfer.key, transfer.ending[1]))
        began = transfer.at.setdefault("cancelled", now)
        self._wait(transfer, now + self._config.retry_s, began + self._config.lease_s)

    def _quarantine(self, transfer: Receiving, now: float) -> None:
        """A sender that we cannot hear may post until the lease has ended that it began, at the latest, when it
        sent what we last heard of it; and what it has posted may land until the transport has given it up."""
        session = self._outbound.get(transfer.target)
        heard = session.last_heard if session is not None else now
        transfer.at["quarantined"] = now
        self._outbox.count("recv_abandoned", transfer.ending[1])
        self._wait(transfer, None, max(now, heard + self._config.lease_s) + self._config.quarantine_s)

    def _free(self, transfer: Receiving, now: float) -> None:
        """Give the engine its blocks back: once, and never while anyone may write to them."""
        if transfer.holds:
            transfer.holds = False
            outcome, reason, detail = transfer.ending
            self._outbox.event(ReceiveEnded(transfer.key, transfer.request_id, outcome, reason, detail))

    def _retire(self, transfer: Receiving, now: float) -> None:
        outcome, reason, _ = transfer.ending
        del self._transfers[transfer.key]
        self._noticing -= transfer.noticing
        self._retired.add(transfer.key, outcome, reason, now)
        transfer.at["ended"] = now
        self._free(transfer, now)
        self._outbox.event(Ended(transfer.record(self._layout.token_bytes)))

    # for the endpoint -----------------------------------------------------------------------------------
    @property
    def notices_due(self) -> int:
        """Transfers whose sender may be writing, or says that it has written."""
        return self._noticing

    def __len__(self) -> int:
        return len(self._transfers)

    def owner(self, key: Key) -> RequestId | None:
        """The request that a live transfer belongs to."""
        transfer = self._transfers.get(key)
        return transfer.request_id if transfer is not None else None


def _overdue(transfer: Receiving) -> tuple[Reason, str]:
    if transfer.state is Recv.ACCEPTED:
        return Reason.DEADLINE, "accepted, but not written within transfer_s"
    return Reason.PEER_SILENT, "the sender did not answer"
