"""What an endpoint tells its engine. Drained by the driver, never called back."""

from enum import StrEnum

import msgspec

from kvpush.core.errors import Reason
from kvpush.core.ids import Key, RequestId


class Outcome(StrEnum):
    """How a transfer ended on one side (R3): exactly one of these, once."""

    DELIVERED = "delivered"
    FAILED = "failed"
    EXPIRED = "expired"


class Role(StrEnum):
    """Which end of a transfer this is."""

    SENDER = "sender"
    RECEIVER = "receiver"


class Purpose(StrEnum):
    """What a transfer is received for."""

    PROMPT = "prompt"  # to decode: the prompt was computed for it
    CONVERSATION = "conversation"  # to go on computing: an earlier turn has left it


class TransferRecord(msgspec.Struct, kw_only=True):
    """What is known of one ended transfer: one debug log line, and the bench's hand-over split.

    `at` maps a stage name to this process's monotonic clock in seconds. Receiver stages: expected, begun, requested,
    registered, accepted, noticed, ended. Sender stages: announced, begun, registered, first_posted, final and posted
    (the last time that more was final, or was posted), written, ended. Missing stages did not happen.
    """

    key: Key
    role: Role
    request_id: RequestId | None
    peer: str
    outcome: Outcome
    reason: Reason
    detail: str = ""
    tokens: int = 0
    nbytes: int = 0
    writes: int = 0
    descriptors: int = 0
    blocks: int = 0
    purpose: Purpose = Purpose.PROMPT
    at: dict[str, float]


class PrefillBegun(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Watch`: it is time for blocks. Either the sender has begun, or it never will, which a `Receive`
    will be told."""

    key: Key
    request_id: RequestId


class ReceiveEnded(msgspec.Struct, frozen=True, tag=True):
    """What a `Receive` has come to: the request may go on.

    Unless `outcome` is DELIVERED the content of its blocks is undefined and must not be used (R6). Nothing will
    write to them any more, unless they are `quarantined`: then they must stay out of use until `BlocksSafe`. `token`:
    what the sender has sampled after the prompt, if that was wanted and there is one.
    """

    key: Key
    request_id: RequestId
    outcome: Outcome
    reason: Reason
    detail: str = ""
    quarantined: bool = False
    token: int | None = None


class BlocksSafe(msgspec.Struct, frozen=True, tag=True):
    """The blocks of a `ReceiveEnded(quarantined=True)` are out of reach: nothing will write to them any more (R1)."""

    key: Key
    request_id: RequestId


class Found(msgspec.Struct, frozen=True, tag=True):
    """What an `Inquire` has come to: so many tokens are there to be received, 0 when the peer has none, or says
    nothing."""

    key: Key
    request_id: RequestId
    tokens: int


class SourceFree(msgspec.Struct, frozen=True, tag=True):
    """No posted write reads the blocks of a `Final(last=True)`, `Withdraw` or `Keep` any more (R2)."""

    key: Key
    request_id: RequestId


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A transfer has its one outcome on this side; `record` says how it went."""

    record: TransferRecord


class Counted(msgspec.Struct, frozen=True, tag=True):
    """One named counter went up by `amount` (I5: each abnormal end counts exactly once)."""

    name: str
    reason: Reason
    amount: int = 1


class PeerChanged(msgspec.Struct, frozen=True, tag=True):
    """A peer became ready, was refused, or was lost; for logs and gauges."""

    peer: str
    ready: bool
    reason: Reason
    detail: str = ""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Everything asked for by `Stop` has ended; the thread may exit."""


Event = PrefillBegun | ReceiveEnded | BlocksSafe | Found | SourceFree | Ended | Counted | PeerChanged | Stopped
