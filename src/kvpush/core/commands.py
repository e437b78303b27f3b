"""What an engine asks of its endpoint: small frozen values put into the transfer thread's mailbox.

The promises that come back (see events.py):
  each `Watch`                      is answered by exactly one `PrefillBegun`, unless `Receive` or `Abort` comes first
  each `Receive`                    is answered by exactly one `ReceiveEnded`, and that, if it says
                                    `quarantined`, is followed by exactly one `BlocksSafe`
  each `Final(last=True)`/`Withdraw` is answered by exactly one `SourceFree`
"""

import msgspec

from kvpush.core.errors import Reason
from kvpush.core.ids import Key, RequestId, Target
from kvpush.core.layout import Blocks, Span
from kvpush.core.mode import Mode


class Expect(msgspec.Struct, frozen=True, tag=True):
    """Receiver: a request with this key has arrived but has no blocks yet. Connect to `target` and
    keep the sender's lease alive until `Receive` or `Abort`."""

    key: Key
    request_id: RequestId
    target: Target


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Receiver: after `Expect`: say when the sender has begun, so that no blocks are set aside long before."""

    key: Key
    request_id: RequestId


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Receiver: get tokens `span` into `blocks`. Nothing of our own may still write to them (R12). `wants_token`: the
    token that the sender has sampled after the prompt is wanted with it, if there is one. `mode` is who is to move the
    bytes; None leaves the choice to what the two engines can do, and do faster."""

    key: Key
    request_id: RequestId
    target: Target
    span: Span
    blocks: Blocks
    wants_token: bool = False
    mode: Mode | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Receiver: the request is gone, or needs nothing (`reason` NOT_NEEDED). Valid after `Expect` or
    `Receive`; ignored for a key that has ended."""

    key: Key
    reason: Reason = Reason.ABORTED


class Disown(msgspec.Struct, frozen=True, tag=True):
    """Receiver: a request with this key was turned away, perhaps before anything else was said of it: the sender need
    not keep anything. Ignored for a key that is known here: what becomes of that has been said already."""

    key: Key
    request_id: RequestId
    target: Target


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Sender: a prefill request with this key has been accepted by the engine."""

    key: Key
    request_id: RequestId


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Sender: this prompt has every block that it needs here: nothing of this engine's other requests can hold it up
    any more."""

    key: Key
    request_id: RequestId


class Final(msgspec.Struct, frozen=True, tag=True):
    """Sender: the tokens [0, `tokens`) are final on the device (R13) in `blocks` (from token 0 on).

    `last`: the prompt is complete, and the blocks stay pinned until `SourceFree`. Earlier calls (`last=False`) only
    ever grow `tokens`; their blocks are not pinned (see `Retract`). `layers`: how many layers, from the first on,
    this is true of; None is all of them.
    """

    key: Key
    request_id: RequestId
    tokens: int
    blocks: Blocks
    last: bool = True
    layers: int | None = None


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """Sender: the token after the prompt, None when there will be none. A receiver that wants it is told that it has
    everything no sooner than this has been said."""

    key: Key
    request_id: RequestId
    token: int | None


class Retract(msgspec.Struct, frozen=True, tag=True):
    """Sender: the blocks of this request's `Final(last=False)` commands are being used for something else (it was
    preempted), and may have been since before this command. What was written of them is written again once it is
    final again, and until then the receiver is not told that it has everything."""

    key: Key
    request_id: RequestId


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Sender: the request ends without delivering (aborted, preempted, failed)."""

    key: Key
    request_id: RequestId
    reason: Reason
    detail: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Both: fail or finish every transfer explicitly, then report `Stopped`."""


Command = Expect | Watch | Receive | Abort | Disown | Announce | Begin | Sampled | Final | Retract | Withdraw | Stop
