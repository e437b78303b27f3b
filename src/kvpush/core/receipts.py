"""The transfers of a receiver: records, table, deadlines, and what ends them, whoever moves the bytes."""

from collections.abc import Callable

from kvpush.core.asking import Asking
from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import BlocksSafe, Ended, Outcome, PrefillBegun, ReceiveEnded
from kvpush.core.ids import Key, Target
from kvpush.core.layout import Layout
from kvpush.core.mode import Mode
from kvpush.core.outbound import Outbound, Session, SessionState
from kvpush.core.outbox import Outbox
from kvpush.core.receiving import Receiving
from kvpush.core.retired import Retired
from kvpush.core.sending import Ending
from kvpush.core.tables import RECEIVER, Recv, RecvAction, RecvInput
from kvpush.core.timers import Timers


class Receipts:
    """One record per transfer, and nothing beside it."""

    def __init__(self, config: ProtocolConfig, layout: Layout, outbound: Outbound, outbox: Outbox) -> None:
        self._config = config
        self._layout = layout
        self._outbound = outbound
        self._outbox = outbox
        self._transfers: dict[Key, Receiving] = {}
        self._retired = Retired(config.retired_memory_s, config.retired_memory_keys)
        self._asking = Asking(config, outbound)
        self._noticing = 0
        self._timers: Timers[Key] = Timers(self._deadline_of)
        self._actions: dict[RecvAction, Callable[[Receiving, float], None]] = {
            RecvAction.WATCH: self._watch,
            RecvAction.REPORT: self._report,
            RecvAction.REGISTER: self._register,
            RecvAction.CANCEL: self._cancel,
            RecvAction.FREE: self._free,
            RecvAction.QUARANTINE: self._quarantine,
            RecvAction.INQUIRE: self._inquire,
            RecvAction.EXTEND: self._extend,
            RecvAction.ASK: self._register,
            RecvAction.RETIRE: self._retire,
        }

    def _of(self, key: Key, session: Session) -> Receiving | None:
        """The transfer that a sender speaks of, if it is one with that sender: once a process has been told of
        blocks, it is only its own word that frees them, on whatever link it comes."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.registered_with(session.epoch):
            return transfer
        if transfer is not None and transfer.sender is None and transfer.target == session.target:
            return transfer
        self._outbox.count("late_message", Reason.RETIRED_TRANSFER if key in self._retired else Reason.UNKNOWN_TRANSFER)
        return None

    def _with(self, session: Session) -> list[Receiving]:
        return [t for t in self._transfers.values() if t.target == session.target]

    def _ready(self, transfer: Receiving, session: Session, now: float) -> None:
        """The sender can be told."""
        raise NotImplementedError

    # time -----------------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Session]:
        """Repeat what was not answered; stop waiting for what will not come. Returns the senders of reads that do not
        stop: they must be lost, so that the transport gives those reads up."""
        stuck: dict[Target, Session] = {}
        for key in self._timers.due(now):
            transfer = self._transfers[key]
            if now >= transfer.noticed_by(self._config):
                why = (Outcome.FAILED, Reason.NOTICE_LOST, "written, but never noticed")
                self._step(transfer, RecvInput.FAIL, now, why)
            elif transfer.limit_at is not None and now >= transfer.limit_at:
                if session := self._at_the_limit(transfer, now):
                    stuck[session.target] = session
            else:
                self._repeat(transfer, now)
        return list(stuck.values())

    def _at_the_limit(self, transfer: Receiving, now: float) -> Session | None:
        """The time that a transfer had in its state is over. Returns its sender if only its loss can help."""
        if transfer.ops and transfer.state is Recv.SEVERED:  # the transport has not given it up yet
            self._wait(transfer, None, now + self._config.quarantine_s)
        elif transfer.state is Recv.STOPPING:
            self._wait(transfer, None, None)
            self._outbox.count("read_stuck", transfer.ending[1])
            return self._outbound.get(transfer.target)
        else:
            self._step(transfer, transfer.at_the_limit, now, (Outcome.FAILED, *self._overdue(transfer)))
        return None

    def _overdue(self, transfer: Receiving) -> tuple[Reason, str]:
        """Why a limit was reached. A sender whose connection has broken may not come back: that is more than silence,
        and known already when the time for its answer is over before the time for its return."""
        reason, detail = transfer.overdue
        session = self._outbound.get(transfer.target)
        return (session.suspicion if reason is Reason.PEER_SILENT and session is not None else reason), detail

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

    def _repeat(self, transfer: Receiving, now: float) -> None:
        pause = self._config.retry_s
        if transfer.state is Recv.QUARANTINED:
            self._outbound.session(transfer.target, now)  # it may be back, and can be asked then
            pause = self._config.connect_timeout_s
        session = self._outbound.get(transfer.target)
        if session is not None and session.state is SessionState.READY:
            self._ready(transfer, session, now)
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
        """Ask again from time to time: the answer may be lost, or take long."""
        self._asking.watch(transfer, now)
        self._wait(transfer, now + self._config.heartbeat_s, None)

    def _report(self, transfer: Receiving, now: float) -> None:
        self._outbox.event(PrefillBegun(transfer.key, transfer.request_id))
        self._wait(transfer, None, None)

    def _register(self, transfer: Receiving, now: float) -> None:
        self._asking.register(transfer, now)
        limit = transfer.limit_at if transfer.limit_at is not None else now + self._config.peer_timeout_s
        self._wait(transfer, now + self._config.retry_s, limit)

    def _cancel(self, transfer: Receiving, now: float) -> None:
        """Say it if the sender can hear it, and again until it answers or its lease must have ended."""
        if not self._asking.cancel(transfer):
            self._step(transfer, RecvInput.PEER_LOST if transfer.exposed else RecvInput.DOOMED, now)
            return
        if "cancelled" not in transfer.at:
            # after we have stood still the lease may be over, and nobody has had the time to answer
            transfer.limit_at = max(self._asking.lease_ends(transfer, now), now + self._config.retry_s)
        transfer.at.setdefault("cancelled", now)
        self._wait(transfer, now + self._config.retry_s, transfer.limit_at)

    def _quarantine(self, transfer: Receiving, now: float) -> None:
        """A sender that does not answer may post until its lease has ended, and what it has posted may land until
        the transport has given it up. The request need not wait for that, only its blocks."""
        limit = max(now, self._asking.lease_ends(transfer, now)) + self._config.quarantine_s
        self._keep_apart(transfer, now)
        self._wait(transfer, now + self._config.retry_s, limit)

    def _keep_apart(self, transfer: Receiving, now: float) -> None:
        transfer.at["quarantined"] = now
        self._outbox.count("recv_abandoned", transfer.ending[1])
        transfer.unsafe = transfer.holds
        self._free(transfer, now)

    def _inquire(self, transfer: Receiving, now: float) -> None:
        self._asking.inquire(transfer)
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
        self._retired.add(transfer.key, outcome, reason, transfer.mode or Mode.PUSH, now)
        transfer.at["ended"] = now
        self._free(transfer, now)
        if transfer.unsafe:
            self._outbox.event(BlocksSafe(transfer.key, transfer.request_id))
        self._outbox.event(Ended(transfer.record(self._layout.token_bytes)))
