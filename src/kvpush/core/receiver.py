"""The receiving side: prompts whose KV is elsewhere and is wanted here. One record holds all of one transfer."""

from collections.abc import Callable

from kvpush.core.commands import Abort, Disown, Expect, Receive, Watch
from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from kvpush.core.events import BlocksSafe, Ended, Outcome, PrefillBegun, ReceiveEnded
from kvpush.core.ids import Key
from kvpush.core.layout import Layout, check_blocks
from kvpush.core.messages import Beat, Cancel, Interest, Notice
from kvpush.core.outbound import Outbound, Session, SessionState
from kvpush.core.outbox import Outbox
from kvpush.core.receiving import Receiving
from kvpush.core.retired import Retired
from kvpush.core.sending import Ending
from kvpush.core.tables import RECEIVER, Recv, RecvAction, RecvInput
from kvpush.core.timers import Timers

_LIVE = (Recv.EXPECTING, Recv.WATCHING, Recv.CONNECTING, Recv.REGISTERED, Recv.ACCEPTED)


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
            RecvAction.WATCH: self._watch,
            RecvAction.REPORT: self._report,
            RecvAction.REGISTER: self._register,
            RecvAction.CANCEL: self._cancel,
            RecvAction.FREE: self._free,
            RecvAction.QUARANTINE: self._quarantine,
            RecvAction.ASK: self._ask,
            RecvAction.EXTEND: self._extend,
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

    def watch(self, command: Watch, now: float) -> None:
        """Say when the sender has begun; of one that cannot, say so now."""
        transfer = self._transfers.get(command.key)
        if transfer is None or transfer.request_id != command.request_id:
            detail = f"{command.key} is not expected by {command.request_id}"
            raise LocalProtocolError(detail, Reason.DUPLICATE_KEY)
        self._step(transfer, RecvInput.WATCH, now)
        if transfer.end is not None:
            self._step(transfer, RecvInput.BEGUN, now)

    def receive(self, command: Receive, now: float) -> None:
        """The request has blocks: register them as soon as the sender can hear of it."""
        self._check_blocks(command)
        transfer = self._transfers.get(command.key)
        if transfer is None:
            self._check_new(command.key)
            transfer = Receiving(command.key, command.request_id, command.target)
            self._transfers[command.key] = transfer
        else:
            transfer.check_expected(command)
        transfer.span, transfer.blocks, transfer.holds = command.span, command.blocks, True
        transfer.purpose, transfer.wants_token = command.purpose, command.wants_token
        transfer.at["requested"] = now
        self._step(transfer, RecvInput.RECEIVE, now)
        if transfer.end is not None:
            self._step(transfer, RecvInput.DOOMED, now)
        elif self._outbound.session(transfer.target, now).state is SessionState.READY:
            self._step(transfer, RecvInput.READY, now)

    def abort(self, command: Abort, now: float) -> None:
        """The request is gone, or needs nothing. What was asked for and has not come is never called delivered."""
        transfer = self._transfers.get(command.key)
        if transfer is None:
            return
        wanted_nothing = command.reason is Reason.NOT_NEEDED and not transfer.holds
        outcome = Outcome.DELIVERED if wanted_nothing else Outcome.FAILED
        self._step(transfer, RecvInput.ABORT, now, (outcome, command.reason, ""))

    def disown(self, command: Disown, now: float) -> None:
        """Nobody will ask for this key, unless somebody has."""
        if command.key not in self._transfers and command.key not in self._retired:
            self.expect(Expect(command.key, command.request_id, command.target), now)
            self.abort(Abort(command.key), now)

    def stop(self, now: float) -> None:
        """Give everything up; what was registered ends when its sender has answered, or by time."""
        for transfer in list(self._transfers.values()):
            self._step(transfer, RecvInput.ABORT, now, (Outcome.FAILED, Reason.SHUTDOWN, "the receiver is stopping"))

    def _check_new(self, key: Key) -> None:
        if key in self._transfers or key in self._retired:
            detail = f"{key} has been used before; every attempt needs a key of its own"
            raise LocalProtocolError(detail, Reason.DUPLICATE_KEY)

    def _check_blocks(self, command: Receive) -> None:
        try:
            check_blocks(self._layout, command.span, command.blocks)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"{command.key}: {error}", error.reason) from None

    # the sender -----------------------------------------------------------------------------------------
    def begun(self, key: Key, session: Session, now: float) -> None:
        """It is time to register. Whoever does not wait for that has done so, or has gone."""
        transfer = self._of(key, session)
        if transfer is not None and transfer.state is Recv.WATCHING:
            transfer.at["begun"] = now
            self._step(transfer, RecvInput.BEGUN, now)

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
            self._step(transfer, RecvInput.FAIL, now, (Outcome.FAILED, reason, detail))

    def released(self, key: Key, session: Session, now: float) -> None:
        """Dropped or Drained."""
        transfer = self._of(key, session)
        if transfer is not None:
            why = (Outcome.FAILED, Reason.PREFILL_FAILED, "the sender dropped the transfer")
            self._step(transfer, RecvInput.RELEASE, now, why)

    def draining(self, key: Key, session: Session, now: float) -> None:
        """The sender is closed, but writes are still in flight."""
        transfer = self._of(key, session)
        if transfer is not None:
            self._step(transfer, RecvInput.DRAIN, now)
            self.writing(key, session)

    def writing(self, key: Key, session: Session) -> None:
        """The sender has posted a write, which needs our transport to be polled."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.registered_with(session.epoch):
            self._noticing += not transfer.noticing
            transfer.writing = True

    def written(self, key: Key, session: Session, now: float) -> None:
        """The sender says that all has been written: the notices must come soon, if they have not already."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.registered_with(session.epoch) and transfer.told_at is None:
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
                why = (Outcome.FAILED, Reason.UNKNOWN_TRANSFER, "the sender has forgotten it")
                self._step(transfer, RecvInput.GIVE_UP, now, why)

    def _of(self, key: Key, session: Session) -> Receiving | None:
        """The transfer that a sender speaks of, if it is one with that sender: once a process has been told of
        blocks, it is only its own word that frees them, on whatever link it comes."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.registered_with(session.epoch):
            return transfer
        if transfer is not None and not transfer.registered and transfer.target == session.target:
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
        transfer.token = notice.token if notice.parts else transfer.token
        if transfer.complete:
            transfer.at["noticed"] = now
            self._step(transfer, RecvInput.COMPLETE, now, (Outcome.DELIVERED, Reason.OK, ""))

    # sessions -------------------------------------------------------------------------------------------
    def session_ready(self, session: Session, now: float) -> None:
        """A sender can be told what waited for it."""
        for transfer in self._with(session):
            self._step(transfer, RecvInput.READY, now)

    def session_lost(self, session: Session, reason: Reason, detail: str, now: float) -> None:
        """A sender is gone."""
        for transfer in self._with(session):
            self._lose(transfer, (Outcome.FAILED, reason, detail), now)

    def abandon(self, now: float) -> None:
        """The time to stop is over: no request waits any longer for a sender's word."""
        for transfer in list(self._transfers.values()):
            self._lose(transfer, (Outcome.FAILED, Reason.SHUTDOWN, "the receiver has stopped"), now)

    def _lose(self, transfer: Receiving, why: Ending, now: float) -> None:
        told = transfer.registered or transfer.state is not Recv.CANCELLING
        self._step(transfer, RecvInput.PEER_LOST if told else RecvInput.DOOMED, now, why)

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
            if now >= transfer.noticed_by(self._config):
                why = (Outcome.FAILED, Reason.NOTICE_LOST, "written, but never noticed")
                self._step(transfer, RecvInput.FAIL, now, why)
            elif transfer.limit_at is not None and now >= transfer.limit_at:
                self._step(transfer, transfer.at_the_limit, now, (Outcome.FAILED, *self._overdue(transfer)))
            else:
                self._repeat(transfer, now)

    def next_deadline(self) -> float | None:
        """When there is next something to repeat or to give up."""
        return self._timers.earliest()

    def _deadline_of(self, key: Key) -> float | None:
        transfer = self._transfers.get(key)
        return transfer.deadline(self._config) if transfer is not None else None

    def _wait(self, transfer: Receiving, retry_at: float | None, limit_at: float | None) -> None:
        transfer.retry_at, transfer.limit_at = retry_at, limit_at
        self._arm(transfer)

    def _arm(self, transfer: Receiving) -> None:
        deadline = self._deadline_of(transfer.key)
        if deadline is not None:
            self._timers.arm(transfer.key, deadline)

    def _overdue(self, transfer: Receiving) -> tuple[Reason, str]:
        """Why a limit was reached. A sender whose connection has broken may not come back: that is more than silence,
        and known already when the time for its answer is over before the time for its return."""
        reason, detail = transfer.overdue
        session = self._outbound.get(transfer.target)
        return (session.suspicion if reason is Reason.PEER_SILENT and session is not None else reason), detail

    def _repeat(self, transfer: Receiving, now: float) -> None:
        pause = self._config.retry_s
        if transfer.state is Recv.QUARANTINED:
            self._outbound.session(transfer.target, now)  # it may be back, and can be asked then
            pause = self._config.connect_timeout_s
        session = self._outbound.get(transfer.target)
        if session is not None and session.state is SessionState.READY:
            self._step(transfer, RecvInput.READY, now)
        else:
            self._wait(transfer, now + pause, transfer.limit_at)

    # the table ------------------------------------------------------------------------------------------
    def _step(self, transfer: Receiving, happened: RecvInput, now: float, why: Ending | None = None) -> None:
        """`why` is how the transfer ends, if this ends it and nothing else has before."""
        try:
            after, actions = RECEIVER[transfer.state, happened]
        except KeyError:
            raise LocalProtocolError(f"{transfer.key}: {happened} is not possible when {transfer.state}") from None
        transfer.state = after
        transfer.end = transfer.end or why
        for action in actions:
            self._actions[action](transfer, now)

    def _watch(self, transfer: Receiving, now: float) -> None:
        """Ask, if the sender can hear it, and again from time to time: the answer may be lost, or take long."""
        session = self._outbound.session(transfer.target, now)
        if session.state is SessionState.READY:
            self._outbound.tell(session, Interest(transfer.key))
        self._wait(transfer, now + self._config.heartbeat_s, None)

    def _report(self, transfer: Receiving, now: float) -> None:
        self._outbox.event(PrefillBegun(transfer.key, transfer.request_id))
        self._wait(transfer, None, None)

    def _register(self, transfer: Receiving, now: float) -> None:
        session = self._outbound.session(transfer.target, now)
        transfer.sender = session.epoch
        transfer.at.setdefault("registered", now)
        self._outbound.tell(session, transfer.registration(session.clock))
        limit = transfer.limit_at if transfer.limit_at is not None else now + self._config.peer_timeout_s
        self._wait(transfer, now + self._config.retry_s, limit)

    def _cancel(self, transfer: Receiving, now: float) -> None:
        """Say it if the sender can hear it, and again until it answers or its lease must have ended."""
        session = self._outbound.get(transfer.target)
        if session is None:
            self._step(transfer, RecvInput.PEER_LOST if transfer.registered else RecvInput.DOOMED, now)
            return
        if session.state is SessionState.READY:
            self._outbound.tell(session, Cancel(transfer.key, transfer.ending[1]))
        limit = transfer.limit_at if "cancelled" in transfer.at else self._lease_ends(transfer, now)
        transfer.at.setdefault("cancelled", now)
        self._wait(transfer, now + self._config.retry_s, limit)

    def _quarantine(self, transfer: Receiving, now: float) -> None:
        """A sender that does not answer may post until its lease has ended, and what it has posted may land until
        the transport has given it up. The request need not wait for that, only its blocks."""
        limit = max(now, self._lease_ends(transfer, now)) + self._config.quarantine_s
        transfer.at["quarantined"] = now
        self._outbox.count("recv_abandoned", transfer.ending[1])
        transfer.unsafe = transfer.holds
        self._free(transfer, now)
        self._wait(transfer, now + self._config.retry_s, limit)

    def _lease_ends(self, transfer: Receiving, now: float) -> float:
        """When the sender's lease has ended at the latest, for a transfer whose lease we renew no more. It runs from
        a time of the sender's clock that we have echoed, and so from before we last heard of the sender."""
        if transfer.lease_ends is None:
            session = self._outbound.get(transfer.target)
            heard = session.last_heard if session is not None else now
            transfer.lease_ends = heard + self._config.lease_s
        return transfer.lease_ends

    def _ask(self, transfer: Receiving, now: float) -> None:
        """The address of a lost sender answers. If it is the process that was lost, its word ends the quarantine."""
        session = self._outbound.get(transfer.target)
        if session is not None and transfer.registered_with(session.epoch):
            self._outbound.tell(session, Cancel(transfer.key, transfer.ending[1]))
        self._wait(transfer, now + self._config.connect_timeout_s, transfer.limit_at)

    def _extend(self, transfer: Receiving, now: float) -> None:
        """Writes are in flight at a sender that lives: it will say when they have stopped."""
        limit = max(transfer.limit_at or now, now + self._config.quarantine_s)
        self._wait(transfer, transfer.retry_at, limit)

    def _free(self, transfer: Receiving, now: float) -> None:
        """Let the request go on, once. It gets its blocks back with that, unless they are `unsafe`."""
        if transfer.holds:
            transfer.holds = False
            outcome, reason, detail = transfer.ending
            token = transfer.token if outcome is Outcome.DELIVERED else None
            ended = ReceiveEnded(transfer.key, transfer.request_id, outcome, reason, detail, transfer.unsafe, token)
            self._outbox.event(ended)

    def _retire(self, transfer: Receiving, now: float) -> None:
        outcome, reason, _ = transfer.ending
        del self._transfers[transfer.key]
        self._noticing -= transfer.noticing
        self._retired.add(transfer.key, outcome, reason, now)
        transfer.at["ended"] = now
        self._free(transfer, now)
        if transfer.unsafe:
            self._outbox.event(BlocksSafe(transfer.key, transfer.request_id))
        self._outbox.event(Ended(transfer.record(self._layout.token_bytes)))

    # for the endpoint -----------------------------------------------------------------------------------
    @property
    def notices_due(self) -> int:
        """Transfers whose sender may be writing, or says that it has written."""
        return self._noticing

    def __len__(self) -> int:
        return len(self._transfers)

    def refuse(self, command: Receive, error: LocalProtocolError, now: float) -> None:
        """Answer a `Receive` that broke the rules, unless that would free what an earlier one of it waits for."""
        transfer = self._transfers.get(command.key)
        mine = transfer is not None and transfer.request_id == command.request_id
        if mine and transfer is not None and transfer.holds:
            return
        self._outbox.event(ReceiveEnded(command.key, command.request_id, Outcome.FAILED, error.reason, str(error)))
        if mine:
            self.abort(Abort(command.key, error.reason), now)
