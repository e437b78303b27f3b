"""The sending side: prompts whose KV is here and is wanted elsewhere. One record holds all of one transfer."""

from collections.abc import Callable, Iterable

from kvpush.core.chunks import next_writes
from kvpush.core.commands import Announce, Begin, Final, Retract, Sampled, Withdraw
from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from kvpush.core.events import Ended, Outcome, SourceFree
from kvpush.core.ids import Epoch, Key, OpId, RequestId
from kvpush.core.inbound import Caller
from kvpush.core.inflight import InFlight
from kvpush.core.layout import Layout
from kvpush.core.messages import (
    Accepted,
    Beat,
    Begun,
    Draining,
    Dropped,
    End,
    Failed,
    Message,
    Register,
    Writing,
)
from kvpush.core.mode import Mode
from kvpush.core.offers import check_registration
from kvpush.core.outbox import Outbox
from kvpush.core.planner import Plan
from kvpush.core.retired import Retired
from kvpush.core.sending import Ending, Sending, epitaph, told
from kvpush.core.tables import SENDER, Send, SendAction, SendInput
from kvpush.core.timers import Timers

_WORDS: dict[SendAction, Callable[[Key], Message]] = {
    SendAction.ACCEPT: Accepted,
    SendAction.DROP: Dropped,
    SendAction.DRAIN: Draining,
}
"""What a sender only has to say."""


class Sender:
    """All transfers that this endpoint sends."""

    def __init__(self, config: ProtocolConfig, layout: Layout, outbox: Outbox) -> None:
        self._config = config
        self._layout = layout
        self._outbox = outbox
        self._transfers: dict[Key, Sending] = {}
        self._in_flight = InFlight(config.window_bytes, outbox)
        self._stopping = False
        self._retired = Retired(config.retired_memory_s, config.retired_memory_keys)
        self._timers: Timers[Key] = Timers(self._deadline_of)
        self._actions: dict[SendAction, Callable[[Sending, float], None]] = {
            SendAction.ANSWER: self._answer,
            SendAction.ADVANCE: self._advance,
            SendAction.CLOSE: self._close,
            SendAction.HINT: self._hint,
            SendAction.TELL: self._tell_end,
            SendAction.RETIRE: self._retire,
        }

    # our engine -----------------------------------------------------------------------------------------
    def announce(self, command: Announce, now: float) -> None:
        """A prefill request with this key exists."""
        if command.key in self._retired:
            return
        transfer = self._mine(command.key, command.request_id, now)
        self._step(transfer, SendInput.ANNOUNCE, now)
        transfer.identify(command.request_id, "announced", now)

    def begin(self, command: Begin, now: float) -> None:
        """The prompt has every block that it needs here."""
        if command.key not in self._transfers:
            return
        transfer = self._mine(command.key, command.request_id, now)
        transfer.begin(now)
        self._step(transfer, SendInput.BEGIN, now)

    def sampled(self, command: Sampled, now: float) -> None:
        """The token after the prompt is known, or there will be none."""
        if command.key not in self._transfers:
            return
        transfer = self._mine(command.key, command.request_id, now)
        transfer.sampled, transfer.token = True, command.token
        self._step(transfer, SendInput.SAMPLED, now)

    def final(self, command: Final, now: float) -> None:
        """Tokens are final. A transfer that has ended already frees its source at once."""
        if command.key in self._retired:
            if command.last:
                self._outbox.event(SourceFree(command.key, command.request_id))
            return
        transfer = self._mine(command.key, command.request_id, now)
        final = transfer.final.grown(command.tokens, command.layers)
        transfer.identify(command.request_id, "final", now)
        transfer.at["final"] = now
        transfer.final, transfer.blocks = final, command.blocks
        transfer.pinned = transfer.pinned or command.last
        transfer.begun = transfer.begun or command.last
        if transfer.caller is None:
            self._hold(transfer, now)
        self._step(transfer, SendInput.FINAL, now)

    def retract(self, command: Retract, now: float) -> None:
        """The blocks of a request that was preempted are in other use. Those of a complete prompt are pinned."""
        transfer = self._transfers.get(command.key)
        if transfer is None:
            return
        self._mine(command.key, command.request_id, now)
        if transfer.pinned:
            raise LocalProtocolError(f"{command.key}: the prompt is complete, its blocks are not to be used again")
        self._step(transfer, SendInput.RETRACT, now)
        transfer.retract()
        self._outbox.count("retracted", Reason.OK)

    def withdraw(self, command: Withdraw, now: float) -> None:
        """The request ends without delivering."""
        if command.key in self._retired:
            self._outbox.event(SourceFree(command.key, command.request_id))
            return
        transfer = self._mine(command.key, command.request_id, now)
        transfer.identify(command.request_id, "withdrawn", now)
        transfer.pinned = True
        transfer.end_with(Outcome.FAILED, command.reason, command.detail)
        self._step(transfer, SendInput.WITHDRAW, now)

    def stop(self, now: float) -> None:
        """End everything that can end now; what is in flight drains, and nothing new is accepted."""
        self._stopping = True
        for transfer in list(self._transfers.values()):
            if transfer.state is not Send.DRAINING:
                transfer.end_with(Outcome.FAILED, Reason.SHUTDOWN, "the sender is stopping")
                self._step(transfer, SendInput.WITHDRAW, now)

    def _mine(self, key: Key, request_id: RequestId, now: float) -> Sending:
        """The transfer of one of our requests; two requests with one key are refused."""
        transfer = self._transfer(key, now)
        if transfer.request_id not in (None, request_id):
            detail = f"{key} belongs to request {transfer.request_id}, not to {request_id}"
            raise LocalProtocolError(detail, Reason.DUPLICATE_KEY)
        return transfer

    # the receiver ---------------------------------------------------------------------------------------
    def watch(self, caller: Caller, key: Key, now: float) -> None:
        """A receiver wants to know when a prompt has begun. One that has ended is answered with how."""
        stone = self._retired.get(key)
        if stone is not None:
            self._tell(caller, Failed(key, told(stone.outcome, stone.reason), "this transfer has ended"))
            return
        if self._stopping:
            raise RemoteProtocolError(Reason.SHUTDOWN, "the sender is stopping")
        transfer = self._transfer(key, now)
        transfer.watcher = caller
        self._step(transfer, SendInput.WATCH, now)
        if transfer.state is Send.WATCHED:
            self._timers.arm(key, transfer.never_announced_at(self._config))

    def register(self, caller: Caller, message: Register, now: float) -> None:
        """A receiver asks. Raises RemoteProtocolError when it may not, and nothing is in flight to it."""
        stone = self._retired.get(message.key)
        if stone is not None:
            self._outbox.count("late_message", Reason.RETIRED_TRANSFER)
            self._tell(caller, epitaph(message.key, stone))
            return
        try:
            self._check_registration(caller, message)
        except RemoteProtocolError as error:
            self._reject(caller, message.key, error, now)
            return
        transfer = self._transfer(message.key, now)
        if transfer.caller is None:
            transfer.register(caller, message)
            transfer.at["registered"] = now
            self._hold(transfer, min(message.echo, now))
        transfer.renew(min(message.echo, now) + self._config.lease_s)
        self._step(transfer, SendInput.REGISTER if transfer.mode is Mode.PUSH else SendInput.ASK, now)

    def _check_registration(self, caller: Caller, message: Register) -> None:
        if self._stopping:
            raise RemoteProtocolError(Reason.SHUTDOWN, "the sender is stopping")
        check_registration(caller, message, self._transfers.get(message.key))

    def _reject(self, caller: Caller, key: Key, error: RemoteProtocolError, now: float) -> None:
        """A refusal frees the receiver's blocks, so it must be true for good: the transfer ends, whatever comes
        later, unless it is another receiver's. While writes are in flight to this one, it is told when they stop."""
        transfer = self._transfer(key, now)
        known = transfer.caller
        if known is None or known.epoch == caller.epoch:
            transfer.end_with(Outcome.FAILED, error.reason, str(error))
            self._step(transfer, SendInput.WITHDRAW, now)
        if known is None or known.epoch != caller.epoch:
            raise error
        self._outbox.count("refused", error.reason)

    def cancel(self, caller: Caller, key: Key, reason: Reason, now: float) -> None:
        """The receiver gives a transfer up. A key never heard of is remembered, so that it stays dropped."""
        if key in self._retired:
            self._tell(caller, Dropped(key))
            return
        transfer = self._transfer(key, now)
        if transfer.caller is not None and transfer.caller.epoch != caller.epoch:
            raise RemoteProtocolError(Reason.DUPLICATE_KEY, f"{key} was registered by {transfer.caller.name}", "key")
        transfer.caller = caller
        outcome = Outcome.DELIVERED if reason is Reason.NOT_NEEDED else Outcome.FAILED
        transfer.end_with(outcome, reason, "cancelled by the receiver")
        transfer.cancelled = True
        self._step(transfer, SendInput.CANCEL, now)

    def heartbeat(self, caller: Caller, keys: Iterable[Key], echo: float, now: float) -> Beat:
        """Renew leases by key, from `echo` on; says which keys are unknown here and which have ended."""
        unknown, ended, renewed = [], [], 0
        for key in keys:
            transfer = self._transfers.get(key)
            stone = self._retired.get(key)
            if transfer is not None and (transfer.caller is None or transfer.caller is caller):
                renewed += transfer.renew(min(echo, now) + self._config.lease_s)
                self._remind(transfer)
            elif stone is not None:
                ended.append(End(key, stone.outcome, stone.reason))
            else:
                unknown.append(key)
        if renewed:
            self._outbox.count("lease_renewed", Reason.OK, renewed)
        return Beat(now, tuple(unknown), tuple(ended))

    def _remind(self, transfer: Sending) -> None:
        if transfer.ops:  # a lost hint would hold up the write
            self._say(transfer, Writing(transfer.key))

    def caller_lost(self, caller: Caller, reason: Reason, now: float) -> None:
        """A receiver is gone: nothing more is written to it."""
        for transfer in self._transfers.values():
            transfer.watcher = None if transfer.watcher is caller else transfer.watcher
        for transfer in [t for t in self._transfers.values() if t.ends_with(caller)]:
            transfer.end_with(Outcome.FAILED, reason, f"{caller.name} is gone")
            self._step(transfer, SendInput.PEER_LOST, now)

    # the transport --------------------------------------------------------------------------------------
    def op_finished(self, op: OpId, error: str, now: float) -> None:
        """A write has stopped."""
        key = self._in_flight.stopped(op)
        if key is None:
            self._outbox.count("late_completion", Reason.TRANSPORT)
            return
        transfer = self._transfers[key]
        transfer.stopped(op, now)
        if error:
            transfer.end_with(Outcome.FAILED, Reason.TRANSPORT, error)
            self._step(transfer, SendInput.WRITE_FAILED, now)
        if transfer.ops:
            return
        if transfer.state is Send.DRAINING:
            self._step(transfer, SendInput.STOPPED, now)
        elif transfer.state is Send.WRITING and transfer.committed:
            transfer.written(now)
            self._step(transfer, SendInput.COMPLETE, now)
        elif transfer.state is Send.WRITING:
            self._step(transfer, SendInput.PAUSE, now)

    # time -----------------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Caller]:
        """Expire what nobody has renewed. Returns the receivers whose writes do not stop: they must be lost, so
        that the transport gives those writes up."""
        stuck: dict[Epoch, Caller] = {}
        for key in self._timers.due(now):
            transfer = self._transfers[key]
            if transfer.state is not Send.DRAINING:
                self._expire(transfer, now)
            if transfer.drain_until is None or now < transfer.drain_until:
                continue
            transfer.drain_until = None
            if transfer.caller is not None:
                self._outbox.count("write_stuck", transfer.ending[1])
                stuck[transfer.caller.epoch] = transfer.caller
        return list(stuck.values())

    def _expire(self, transfer: Sending, now: float) -> None:
        unannounced = transfer.never_announced_at(self._config) <= now
        reason = Reason.NEVER_ANNOUNCED if unannounced else Reason.LEASE_EXPIRED
        self._outbox.count("lease_expired", reason)
        transfer.end_with(Outcome.EXPIRED, reason, f"nothing was heard for {now - transfer.began:.1f} s")
        self._step(transfer, SendInput.EXPIRE, now)

    def next_deadline(self) -> float | None:
        """When the first lease ends."""
        return self._timers.earliest()

    def _deadline_of(self, key: Key) -> float | None:
        transfer = self._transfers.get(key)
        return transfer.deadline(self._config) if transfer is not None else None

    def _hold(self, transfer: Sending, since: float) -> None:
        """Something is held for the receiver: begin (or renew) its lease."""
        transfer.lease_until = since + self._config.lease_s
        self._timers.arm(transfer.key, min(transfer.lease_until, transfer.never_announced_at(self._config)))

    # the table ------------------------------------------------------------------------------------------
    def _transfer(self, key: Key, now: float) -> Sending:
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._transfers[key] = Sending(key, now)
        return transfer

    def _step(self, transfer: Sending, happened: SendInput, now: float, why: Ending | None = None) -> None:
        """`why` is how the transfer ends, if this ends it and nothing else has before."""
        try:
            transfer.state, actions = SENDER[transfer.state, happened]
        except KeyError:
            raise LocalProtocolError(f"{transfer.key}: {happened} is not possible when {transfer.state}") from None
        transfer.end = transfer.end or why
        for action in actions:
            if word := _WORDS.get(action):
                self._say(transfer, word(transfer.key))
            else:
                self._actions[action](transfer, now)

    def _answer(self, transfer: Sending, now: float) -> None:
        if transfer.begun and transfer.watcher is not None:
            self._tell(transfer.watcher, Begun(transfer.key))
            transfer.watcher = None  # it will register, and hear of everything else then; or ask again

    def _close(self, transfer: Sending, now: float) -> None:
        """Writes have `drain_s` to stop, but never so long that the receiver may use their blocks again."""
        self._in_flight.give_up(transfer)
        transfer.drain_until = min(now + self._config.drain_s, transfer.fence(now, self._config))
        self._timers.arm(transfer.key, transfer.drain_until)

    def _hint(self, transfer: Sending, now: float) -> None:
        self._say(transfer, transfer.hint)

    def _tell_end(self, transfer: Sending, now: float) -> None:
        self._say(transfer, transfer.last_word)

    def _retire(self, transfer: Sending, now: float) -> None:
        outcome, reason, _ = transfer.ending
        del self._transfers[transfer.key]
        self._retired.add(transfer.key, outcome, reason, transfer.mode, now)
        transfer.at["ended"] = now
        self._outbox.event(Ended(transfer.record()))
        if transfer.pinned and transfer.request_id is not None:
            self._outbox.event(SourceFree(transfer.key, transfer.request_id))

    def _say(self, transfer: Sending, message: Message) -> None:
        listener = transfer.caller or transfer.watcher
        if listener is not None:
            self._tell(listener, message)

    def _tell(self, caller: Caller, message: Message) -> None:
        self._outbox.send(caller.link, caller.epoch, message)

    # writing --------------------------------------------------------------------------------------------
    def _advance(self, transfer: Sending, now: float) -> None:
        """Write what is both final and registered, if anything new is, and nothing of it is being written from other
        blocks. A registration may come so late that its lease has ended already: it expires with the next tick."""
        if not transfer.may_post(now) or transfer.torn:
            return
        try:
            ready = next_writes(transfer, self._layout)
        except ValueError as error:
            transfer.end_with(Outcome.FAILED, Reason.SPAN_NOT_COVERED, str(error))
            self._step(transfer, SendInput.WITHDRAW, now)
            return
        if ready.held:
            self._outbox.count("layers_held", Reason.OK)
        transfer.posted = ready.front
        transfer.committed = transfer.all_posted and transfer.may_commit
        total = transfer.parts + len(ready.plans) if transfer.committed else 0
        for copy in ready.plans:
            self._post(transfer, copy, total, now)

    def may_post(self, op: OpId, now: float) -> bool:
        """Whether an operation that has waited to be posted may still be (R2)."""
        key = self._in_flight.key_of(op)
        transfer = None if key is None else self._transfers.get(key)
        return transfer is not None and transfer.may_post(now)

    def _post(self, transfer: Sending, copy: Plan, total: int, now: float) -> None:
        self._say(transfer, Writing(transfer.key))
        self._in_flight.post(transfer, copy, total, now)
        self._step(transfer, SendInput.POST, now)

    # for the endpoint -----------------------------------------------------------------------------------
    @property
    def ops_in_flight(self) -> int:
        """Posted writes that have not stopped."""
        return len(self._in_flight)

    def __len__(self) -> int:
        return len(self._transfers)

    def refuse(self, command: Final | Withdraw, error: LocalProtocolError, now: float) -> None:
        """Answer a command that broke the rules: at once when the key is another request's, else by ending the
        transfer, for a request that contradicts itself has nothing to deliver."""
        transfer = self._transfers.get(command.key)
        if transfer is None or transfer.request_id != command.request_id:
            self._outbox.event(SourceFree(command.key, command.request_id))
        else:
            self.withdraw(Withdraw(command.key, command.request_id, error.reason, str(error)), now)
