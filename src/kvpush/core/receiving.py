"""All state of one transfer at its receiver: deleting the record is the whole clean-up."""

from dataclasses import dataclass, field

from kvpush.core.commands import Receive
from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import Outcome, Purpose, Role, TransferRecord
from kvpush.core.ids import Epoch, Key, RequestId, Target
from kvpush.core.layout import NOTHING, Blocks, Span
from kvpush.core.messages import Register
from kvpush.core.sending import Ending
from kvpush.core.tables import Recv, RecvInput

_NEVER = float("inf")


@dataclass
class Receiving:
    """One transfer at its receiver.

    `token`: what the sender has sampled after the prompt, if we want it and it has.
    `seen` are the parts whose notices have arrived, of `parts` (0: not known yet). `holds`: our engine waits
    for a ReceiveEnded; `unsafe`: it has had it, and waits for BlocksSafe. `end` is how a transfer that cannot succeed
    any more will end. `retry_at` is when to repeat what was not answered, `limit_at` when to stop waiting.
    `writing`: Writing came; `told_at`: when Written did. `sender` is the process that was told of our blocks;
    `lease_ends` is when its lease has ended at the latest, known once we renew it no more.
    """

    key: Key
    request_id: RequestId
    target: Target
    state: Recv = Recv.NEW
    span: Span = NOTHING
    blocks: Blocks = ()
    purpose: Purpose = Purpose.PROMPT
    holds: bool = False
    unsafe: bool = False
    sender: Epoch | None = None
    seen: set[int] = field(default_factory=set)
    parts: int = 0
    wants_token: bool = False
    token: int | None = None
    end: Ending | None = None
    retry_at: float | None = None
    limit_at: float | None = None
    writing: bool = False
    told_at: float | None = None
    lease_ends: float | None = None
    at: dict[str, float] = field(default_factory=dict)

    @property
    def registered(self) -> bool:
        """Whether a sender may know our blocks."""
        return self.sender is not None

    def registered_with(self, process: Epoch) -> bool:
        """Whether it is this process that may know them."""
        return self.sender == process

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

    def registration(self, echo: float) -> Register:
        """What the sender is told. `echo` as in Heartbeat."""
        return Register(self.key, self.span, self.blocks, echo, self.wants_token)

    def check_expected(self, command: Receive) -> None:
        """Raise `LocalProtocolError` unless these may be the blocks that it waits for."""
        if self.state not in (Recv.EXPECTING, Recv.WATCHING):
            detail = f"{self.key}: Receive is not possible when {self.state}"
            raise LocalProtocolError(detail, Reason.DUPLICATE_KEY)
        if (self.request_id, self.target) != (command.request_id, command.target):
            expected = f"request {self.request_id} from {self.target}"
            detail = f"{self.key} is expected by {expected}, not by {command.request_id}"
            raise LocalProtocolError(detail, Reason.DUPLICATE_KEY)

    def noticed_by(self, config: ProtocolConfig) -> float:
        """When the notices must have come after the sender has said that all is written."""
        if self.told_at is None or self.state in (Recv.CANCELLING, Recv.QUARANTINED):
            return _NEVER
        return self.told_at + config.notice_grace_s

    def deadline(self, config: ProtocolConfig) -> float | None:
        """When there is something to repeat or to give up."""
        deadlines = [t for t in (self.retry_at, self.limit_at) if t is not None]
        earliest = min(self.noticed_by(config), *deadlines) if deadlines else self.noticed_by(config)
        return earliest if earliest < _NEVER else None

    @property
    def at_the_limit(self) -> RecvInput:
        """What its limit means."""
        if self.state is Recv.QUARANTINED:
            return RecvInput.SAFE
        return RecvInput.GIVE_UP if self.registered else RecvInput.DOOMED

    @property
    def overdue(self) -> tuple[Reason, str]:
        """Why it ends at its limit."""
        if self.state is Recv.ACCEPTED:
            return Reason.DEADLINE, "accepted, but not written within transfer_s"
        return Reason.PEER_SILENT, "the sender did not answer"

    def record(self, token_bytes: int) -> TransferRecord:
        """What is known of it, for logs and the benchmark."""
        outcome, reason, detail = self.ending
        delivered = outcome is Outcome.DELIVERED and reason is Reason.OK
        return TransferRecord(
            key=self.key,
            role=Role.RECEIVER,
            request_id=self.request_id,
            peer=str(self.target.address),
            outcome=outcome,
            reason=reason,
            detail=detail,
            tokens=self.span.tokens,
            nbytes=self.span.tokens * token_bytes if delivered else 0,
            blocks=sum(len(ids) for ids in self.blocks),
            purpose=self.purpose,
            at=self.at,
        )
