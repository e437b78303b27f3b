"""What an engine asks of its endpoint: small frozen values put into the transfer thread's mailbox.

The promises that come back (see events.py):
  each `Watch`                      is answered by exactly one `PrefillBegun`, unless `Receive` or `Abort` comes first
  each `Receive`                    is answered by exactly one `ReceiveEnded`, and that, if it says
                                    `quarantined`, is followed by exactly one `BlocksSafe`
  each `Final(last=True)`/`Withdraw` is answered by exactly one `SourceFree`, and so is each `Keep`
  each `Inquire`                    is answered by exactly one `Found`
"""

import msgspec

from kvpush.core.digests import Digests
from kvpush.core.errors import Reason
from kvpush.core.events import Purpose
from kvpush.core.ids import Key, RequestId, Target
from kvpush.core.layout import Blocks, Span


class Expect(msgspec.Struct, frozen=True, tag=True):
    """Receiver: a request with this key has arrived but has no blocks yet. Connect to `target` and
    keep the sender's lease alive until `Receive` or `Abort`."""

    key: Key
    request_id: RequestId
    target: Target


class Inquire(msgspec.Struct, frozen=True, tag=True):
    """Receiver: how many of the tokens that these `digests` speak of does `target` keep under this key? Given after
    an `Expect` of the same key."""

    key: Key
    request_id: RequestId
    target: Target
    digests: Digests


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Receiver: after `Expect`: say when the sender has begun, so that no blocks are set aside long before."""

    key: Key
    request_id: RequestId


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Receiver: write tokens `span` into `blocks`. Nothing of our own may still write to them (R12). `wants_token`: the
    token that the sender has sampled after the prompt is wanted with it, if there is one."""

    key: Key
    request_id: RequestId
    target: Target
    span: Span
    blocks: Blocks
    wants_token: bool = False
    purpose: Purpose = Purpose.PROMPT


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


class Promise(msgspec.Struct, frozen=True, tag=True):
    """Sender: a request is running that is to be kept under this key. Who asks for it meanwhile is answered with the
    `Keep`, or the `Release` that comes in its place."""

    key: Key


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Sender: the tokens [0, `tokens`) of a request that has finished are final in `blocks`, which stay pinned until
    `SourceFree`. Whoever asks with the same tokens (`digests`) within `keep_s` seconds can have them."""

    key: Key
    request_id: RequestId
    tokens: int
    blocks: Blocks
    digests: Digests
    keep_s: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """Sender: the blocks of a `Keep` are needed, unless a peer is receiving them already. Its `SourceFree` follows in
    any case. Or a `Promise` will not be kept."""

    key: Key


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Sender: the request ends without delivering (aborted, preempted, failed)."""

    key: Key
    request_id: RequestId
    reason: Reason
    detail: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Both: fail or finish every transfer explicitly, then report `Stopped`."""


OfReceiver = Expect | Watch | Inquire | Receive | Abort | Disown
OfSender = Announce | Begin | Sampled | Final | Retract | Withdraw | Promise | Keep | Release
Command = OfReceiver | OfSender | Stop
