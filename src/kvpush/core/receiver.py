"""The receiving side: prompts whose KV is elsewhere and is wanted here. One record holds all of one transfer."""

from kvpush.core.commands import Abort, Disown, Expect, Receive, Watch
from kvpush.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from kvpush.core.events import Outcome, ReceiveEnded
from kvpush.core.ids import Key, RequestId
from kvpush.core.layout import check_blocks
from kvpush.core.messages import Beat, Notice
from kvpush.core.outbound import Session, SessionState
from kvpush.core.reader import Reader
from kvpush.core.receiving import READING, Receiving
from kvpush.core.sending import Ending
from kvpush.core.tables import Recv, RecvInput

_LIVE = (
    Recv.EXPECTING,
    Recv.WATCHING,
    Recv.CONNECTING,
    Recv.REGISTERED,
    Recv.ACCEPTED,
    *READING,
)


class Receiver(Reader):
    """All transfers that this endpoint receives."""

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
        transfer.purpose, transfer.wanted = command.purpose, command.mode
        transfer.wants_token = command.wants_token
        transfer.at["requested"] = now
        self._step(transfer, RecvInput.RECEIVE, now)
        if transfer.end is not None:
            self._step(transfer, RecvInput.DOOMED, now)
        elif (session := self._outbound.session(transfer.target, now)).state is SessionState.READY:
            self._ready(transfer, session, now)

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

    def check_mine(self, key: Key, request_id: RequestId) -> None:
        """Raises `LocalProtocolError` when a key has served another request, or does."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.request_id != request_id:
            self._check_new(key)

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
            if transfer.state in (Recv.ACCEPTED, Recv.PROMISED):
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
        if transfer is not None and transfer.exposed_to(session.epoch):
            self._noticing += not transfer.noticing
            transfer.writing = True

    def written(self, key: Key, session: Session, now: float) -> None:
        """The sender says that all has been written: the notices must come soon, if they have not already."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.exposed_to(session.epoch) and transfer.told_at is None:
            self._noticing += not transfer.noticing
            transfer.told_at = now
            self._arm(transfer)

    def beat(self, beat: Beat, session: Session, now: float) -> None:
        """Learn of answers that were lost."""
        for end in beat.ended:
            transfer = self._transfers.get(end.key)
            if transfer is None:
                continue
            if end.outcome is Outcome.DELIVERED and transfer.exposed:
                self.written(end.key, session, now)
            elif (end.outcome, end.reason) == (Outcome.DELIVERED, Reason.OK) and transfer.state is Recv.RELEASING:
                self.confirmed(end.key, session, now)
            else:
                reason = Reason.RETIRED_TRANSFER if end.outcome is Outcome.DELIVERED else end.reason
                self.failed(end.key, session, reason, "learned from a heartbeat", now)
        for key in beat.unknown:
            transfer = self._transfers.get(key)
            if transfer is not None and transfer.state in (Recv.ACCEPTED, Recv.PROMISED):
                why = (Outcome.FAILED, Reason.UNKNOWN_TRANSFER, "the sender has forgotten it")
                self._step(transfer, RecvInput.GIVE_UP, now, why)

    def noticed(self, notice: Notice, now: float) -> None:
        """A part is in our memory."""
        transfer = self._transfers.get(notice.key)
        if transfer is None or not transfer.exposed:
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
            self._ready(transfer, session, now)

    def session_lost(self, session: Session, reason: Reason, detail: str, now: float) -> None:
        """A sender is gone."""
        for transfer in self._with(session):
            self._lose(transfer, (Outcome.FAILED, reason, detail), now)

    def abandon(self, now: float) -> None:
        """The time to stop is over: no request waits any longer for a sender's word."""
        for transfer in list(self._transfers.values()):
            self._lose(transfer, (Outcome.FAILED, Reason.SHUTDOWN, "the receiver has stopped"), now)

    def _lose(self, transfer: Receiving, why: Ending, now: float) -> None:
        told = transfer.exposed or transfer.state is not Recv.CANCELLING
        self._step(transfer, RecvInput.PEER_LOST if told else RecvInput.DOOMED, now, why)

    def live_keys(self, session: Session) -> list[Key]:
        """The transfers whose leases this session should renew."""
        """STOPPING: what is still being read should better not be overwritten."""
        wanted = [t for t in self._with(session) if t.state in _LIVE and t.end is None]
        return [t.key for t in [*wanted, *(t for t in self._with(session) if t.state is Recv.STOPPING)]]

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
