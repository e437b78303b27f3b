"""All state of one transfer at its sender: deleting the record is the whole clean-up."""

from dataclasses import dataclass, field

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, Role, TransferRecord
from kvpush.core.front import NOWHERE, Front
from kvpush.core.ids import Key, OpId, RequestId
from kvpush.core.inbound import Caller
from kvpush.core.layout import NOTHING, Blocks, Span
from kvpush.core.messages import Confirmed, Drained, Failed, Message, Register, Written
from kvpush.core.mode import Mode
from kvpush.core.planner import Plan
from kvpush.core.retired import Tombstone
from kvpush.core.tables import Send

_LEASED = (Send.HELD, Send.WAITING, Send.WRITING, Send.PROMISED, Send.OFFERED, Send.RECALLED)

Ending = tuple[Outcome, Reason, str]
"""Outcome, reason and detail."""


@dataclass
class Sending:
    """One transfer at its sender.

    `final` is final in `blocks`, and `posted` has been posted, in `parts` writes, of which `ops` are still in flight;
    `torn` are those that may have read blocks in other use: what they carried is posted again when they have stopped.
    `watcher`: a receiver that wants to know when the prompt has `begun`, or that it never will.
    `sampled`: the first `token` of the answer is known, or there will be none; a receiver may want to wait for it.
    `pinned`: the prompt is complete, and our engine waits for a SourceFree; `committed`: the receiver learns how many
    parts there are, and with the last of them that it has everything. `end` is how a transfer that is
    draining will end, `drain_until` when its writes should have stopped; `cancelled` whether the receiver waits for
    Drained rather than Failed. `clock`: bytes, see `InFlight`. Writes were in flight
    for `wire_s`, and have been again since `wire_since`.
    """

    key: Key
    began: float
    state: Send = Send.NEW
    request_id: RequestId | None = None
    watcher: Caller | None = None
    begun: bool = False
    sampled: bool = False
    token: int | None = None
    wants_token: bool = False
    final: Front = NOWHERE
    blocks: Blocks = ()
    pinned: bool = False
    caller: Caller | None = None
    mode: Mode = Mode.PUSH
    span: Span = NOTHING
    remote_blocks: Blocks = ()
    posted: Front = NOWHERE
    parts: int = 0
    committed: bool = False
    ops: set[OpId] = field(default_factory=set)
    torn: set[OpId] = field(default_factory=set)
    lease_until: float | None = None
    drain_until: float | None = None
    end: Ending | None = None
    cancelled: bool = False
    clock: int = 0
    nbytes: int = 0
    descriptors: int = 0
    wire_since: float = 0.0
    wire_s: float = 0.0
    at: dict[str, float] = field(default_factory=dict)

    @property
    def all_posted(self) -> bool:
        """Whether the whole span has been posted."""
        return self.caller is not None and self.posted.tokens >= self.span.end

    @property
    def may_commit(self) -> bool:
        """Whether the receiver may be told that it has everything, once it has."""
        return self.pinned and (self.sampled or not self.wants_token)

    @property
    def ending(self) -> Ending:
        """How it ends, or has ended."""
        return self.end or (Outcome.FAILED, Reason.TRANSPORT, "")

    def end_with(self, outcome: Outcome, reason: Reason, detail: str) -> None:
        """The first cause is the one that is reported."""
        if self.end is None:
            self.end = (outcome, reason, detail)

    def may_post(self, now: float) -> bool:
        """Whether a write may be posted now (R2)."""
        writable = self.state in (Send.WAITING, Send.WRITING)
        return writable and self.lease_until is not None and now < self.lease_until

    def add_part(self, op: OpId, copy: Plan, now: float) -> None:
        """One more write has been posted."""
        if not self.ops:
            self.wire_since = now
        self.ops.add(op)
        self.parts += 1
        self.nbytes += copy.total_bytes
        self.descriptors += copy.descriptors
        self.at.setdefault("first_posted", now)
        self.at["posted"] = now

    def stopped(self, op: OpId, now: float) -> None:
        """One write has stopped."""
        self.ops.discard(op)
        self.torn.discard(op)
        if not self.ops:
            self.wire_s += now - self.wire_since

    def begin(self, now: float) -> None:
        """The prompt has every block that it needs here."""
        self.begun = True
        self.at.setdefault("begun", now)

    def written(self, now: float) -> None:
        """All of it has arrived."""
        self.at["written"] = now
        self.end_with(Outcome.DELIVERED, Reason.OK, "")
        if self.caller is not None:
            self.caller.note_pace(self.nbytes, self.wire_s)

    def register(self, caller: Caller, message: Register) -> None:
        """A receiver asks for it."""
        self.mode = message.mode
        self.caller, self.span, self.remote_blocks = caller, message.span, message.blocks
        self.posted, self.wants_token = Front.flat(message.span.start), message.wants_token

    def is_registered_as(self, caller: Caller, message: Register) -> bool:
        """Whether a registration is a repetition of the one that there is."""
        same = self.caller is not None and self.caller.epoch == caller.epoch and self.span == message.span
        wish = (self.remote_blocks, self.wants_token, self.mode)
        return same and wish == (message.blocks, message.wants_token, message.mode)

    def ends_with(self, caller: Caller) -> bool:
        """Whether it ends when this receiver is gone: it is registered, or nobody else has asked for it."""
        return self.watcher is None if self.state is Send.WATCHED else self.caller is caller

    @property
    def hint(self) -> Message:
        """What the receiver hears when all is written."""
        return Written(self.key, self.nbytes, self.wire_s)

    @property
    def last_word(self) -> Message:
        """What the receiver hears when nothing will be written any more."""
        outcome, reason, detail = self.ending
        return Drained(self.key) if self.cancelled else Failed(self.key, told(outcome, reason), detail[:1000])

    def identify(self, request_id: RequestId, stage: str, now: float) -> None:
        """One of our engine's requests has this key."""
        self.request_id = request_id
        self.at.setdefault(stage, now)

    def renew(self, until: float) -> int:
        """Renew a lease that has begun; one that has not cannot run out. Returns how many were renewed."""
        if self.lease_until is None:
            return 0
        self.lease_until = max(self.lease_until, until)
        return 1

    def fence(self, now: float, config: ProtocolConfig) -> float:
        """When its last write must have stopped, so that the receiver can use its blocks again some day."""
        return now if self.lease_until is None else self.lease_until + config.fence_s

    def retract(self) -> None:
        """Nothing is final any more, and nothing that was posted counts."""
        self.final, self.blocks = NOWHERE, ()
        self.posted = Front.flat(self.span.start)
        self.torn = set(self.ops)

    def never_announced_at(self, config: ProtocolConfig) -> float:
        """When to stop waiting for our own engine to hear of it."""
        return self.began + config.unannounced_s if self.request_id is None else float("inf")

    def deadline(self, config: ProtocolConfig) -> float | None:
        """When it is given up, unless something happens. A lease applies where something is held for the receiver.
        When all is posted, writes that are nearly done are not given up for a heartbeat, but before the receiver may
        use their blocks again; when draining, they have a time to stop; None before there is anything to hold."""
        if self.state is Send.DRAINING:
            return self.drain_until
        if self.state is Send.WATCHED:
            return self.never_announced_at(config)
        if self.lease_until is None or self.state not in _LEASED:
            return None
        if self.all_posted:
            return self.lease_until + config.fence_s
        return min(self.lease_until, self.never_announced_at(config))

    def record(self) -> TransferRecord:
        """What is known of it, for logs and the benchmark."""
        outcome, reason, detail = self.ending
        return TransferRecord(
            key=self.key,
            role=Role.SENDER,
            mode=self.mode,
            request_id=self.request_id,
            peer=self.caller.name if self.caller else "",
            outcome=outcome,
            reason=reason,
            detail=detail,
            tokens=self.span.tokens,
            nbytes=self.nbytes,
            writes=self.parts,
            descriptors=self.descriptors,
            blocks=sum(len(ids) for ids in self.remote_blocks or self.blocks),
            at=self.at,
        )


def epitaph(key: Key, stone: Tombstone) -> Message:
    """What a registration for a transfer that has ended is told. After a delivery its notice is still under way, and
    must not be overtaken by a failure; one that asks for what others have got waits for a notice in vain."""
    if stone.is_good and stone.mode is Mode.PULL:
        return Confirmed(key)
    if stone.is_good:
        return Written(key)
    return Failed(key, told(stone.outcome, stone.reason), "this transfer has ended")


def verdict(key: Key, stone: Tombstone) -> Message:
    """What a receiver is told that says it has read all of a transfer that has ended. `Confirmed` if that is how it
    ended: then this is a repetition."""
    if stone.is_good and stone.mode is Mode.PULL:
        return Confirmed(key)
    return Failed(key, told(stone.outcome, stone.reason), "the blocks were given up before they were released")


def told(outcome: Outcome, reason: Reason) -> Reason:
    """The reason a receiver is given when it asks for a transfer that has ended."""
    return Reason.RETIRED_TRANSFER if outcome is Outcome.DELIVERED else reason
