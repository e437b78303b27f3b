"""All state of one transfer at its receiver: deleting the record is the whole clean-up."""

from dataclasses import dataclass, field

from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, Role, TransferRecord
from kvpush.core.ids import Epoch, Key, OpId, RequestId, Target
from kvpush.core.layout import NOTHING, Blocks, Span
from kvpush.core.mode import Mode
from kvpush.core.sending import Ending
from kvpush.core.tables import Recv


@dataclass
class Receiving:
    """One transfer at its receiver.

    `seen` are the parts whose notices have arrived, of `parts` (0: not known yet). `holds`: our engine waits
    for a ReceiveEnded; `unsafe`: it has had it, and waits for BlocksSafe. `end` is how a transfer that cannot succeed
    any more will end. `retry_at` is when to repeat what was not answered, `limit_at` when to stop waiting.
    `writing`: Writing came; `told_at`: when Written did. `sender` is the process that was told of us (with push, of our
    blocks); `lease_ends` is when its lease has ended at the latest, known once we renew it no more. `wanted` is the
    mode that was asked for, if any, `mode` the one that it has; with pull `ops` are our `reads` that are in flight.
    """

    key: Key
    request_id: RequestId
    target: Target
    state: Recv = Recv.NEW
    span: Span = NOTHING
    blocks: Blocks = ()
    holds: bool = False
    unsafe: bool = False
    sender: Epoch | None = None
    seen: set[int] = field(default_factory=set)
    parts: int = 0
    end: Ending | None = None
    retry_at: float | None = None
    limit_at: float | None = None
    writing: bool = False
    told_at: float | None = None
    lease_ends: float | None = None
    wanted: Mode | None = None
    mode: Mode | None = None
    offered: Blocks = ()
    ops: set[OpId] = field(default_factory=set)
    reads: int = 0
    descriptors: int = 0
    at: dict[str, float] = field(default_factory=dict)

    @property
    def exposed(self) -> bool:
        """Whether a sender may know our blocks."""
        return self.sender is not None and self.mode is not Mode.PULL

    def registered_with(self, process: Epoch) -> bool:
        """Whether it is this process that knows of us."""
        return self.sender == process

    def exposed_to(self, process: Epoch) -> bool:
        """Whether it is this process that may know our blocks."""
        return self.exposed and self.sender == process

    @property
    def noticing(self) -> bool:
        """Whether notices are on their way, as far as we know."""
        return self.writing or self.told_at is not None or bool(self.seen)

    @property
    def complete(self) -> bool:
        """Whether each of the parts has been noticed."""
        return bool(self.parts) and len(self.seen.intersection(range(self.parts))) == self.parts

    @property
    def ending(self) -> Ending:
        """How it ends, or has ended."""
        return self.end or (Outcome.FAILED, Reason.ABORTED, "")

    def record(self, token_bytes: int) -> TransferRecord:
        """What is known of it, for logs and the benchmark."""
        outcome, reason, detail = self.ending
        delivered = outcome is Outcome.DELIVERED and reason is Reason.OK
        return TransferRecord(
            key=self.key,
            role=Role.RECEIVER,
            mode=self.mode or Mode.PUSH,
            request_id=self.request_id,
            peer=str(self.target.address),
            outcome=outcome,
            reason=reason,
            detail=detail,
            tokens=self.span.tokens,
            nbytes=self.span.tokens * token_bytes if delivered else 0,
            writes=self.reads,
            descriptors=self.descriptors,
            blocks=sum(len(ids) for ids in self.blocks),
            at=self.at,
        )
