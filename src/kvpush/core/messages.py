"""The wire: every control message and the data plane's notice, as one msgspec tagged union with a version.

History
    1  first version: push (Hello .. Beat, Notice)
    2  Interest, Begun; the first token of the answer (Register.wants_token, Notice.token)
    3  Ask and Holds: prompts that are kept for another turn
    4  pull: modes in Hello, Welcome and Register, the sender's memory in Welcome, Offer, Released, Confirmed; how long
       the writes took in Written

A frame is a msgpack array `[version, source epoch, destination epoch, message]`. The destination epoch is 0
in a Hello, which is the only message that may be sent to an unknown process. Remote bytes become frozen
typed values here, at one door, or a RemoteProtocolError that names the field.
"""

from typing import Annotated, TypeVar

import msgspec

from kvpush.core.digests import Digests
from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.events import Outcome
from kvpush.core.ids import EngineId, Epoch, Key
from kvpush.core.layout import Blocks, Layout, Span
from kvpush.core.mode import Mode

VERSION = 4

MAX_DIGEST_BYTES = 1 << 20
"""In one question: digests of a million tokens."""

MAX_KEYS = 16_384
"""Keys in one heartbeat; a receiver with more sends several."""

_Clock = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
"""Seconds of a process's monotonic clock. The bounds keep out what does not compare: infinity and not-a-number."""

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

_Text = Annotated[str, msgspec.Meta(max_length=1024)]


_Modes = Annotated[tuple[Mode, ...], msgspec.Meta(min_length=1, max_length=len(Mode))]
_PUSH = (Mode.PUSH,)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Receiver: who I am, whom I expect (None: anyone), my memory, my transport's metadata, the modes that I know."""

    engine_id: EngineId
    wants: EngineId | None
    layout: Layout
    metadata: bytes
    modes: _Modes = _PUSH


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """What it takes to read a sender's memory: where it is, and its transport's metadata."""

    layout: Layout
    metadata: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Sender: who answers; the receiver may register. `clock`: the sender's own, see Heartbeat. `modes` are those that
    both take part in; `memory` is there if pull is one of them."""

    engine_id: EngineId
    clock: _Clock
    modes: _Modes = _PUSH
    memory: Opened | None = None


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Either: a message was not accepted. `key` names the transfer when it was about one."""

    reason: Reason
    field: _Text
    detail: _Text
    key: Key | None = None


class Interest(msgspec.Struct, frozen=True, tag="interest"):
    """Receiver: say `Begun` when it is time to register. Repeated until answered; idempotent by key."""

    key: Key


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Sender: the prompt has every block that it needs here: soon nothing but its registration will be missing."""

    key: Key


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Receiver: write tokens `span` into `blocks`, or, with pull, say where they can be read (no `blocks`). Repeated
    until answered; idempotent by key.

    `echo` as in Heartbeat. `wants_token`: the last notice, or the offer, shall bring the first token of the answer.
    """

    key: Key
    span: Span
    blocks: Blocks
    echo: _Clock
    wants_token: bool = False
    mode: Mode = Mode.PUSH


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Sender: the registration is valid and will be written, or offered, when its blocks are final."""

    key: Key


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Sender: the span is in `blocks` (the first id of each group holds its first token), to be read while the lease
    holds. Repeated with each heartbeat until released; idempotent by key. `token` as in Notice."""

    key: Key
    blocks: Blocks
    token: _Token | None = None


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Receiver: all has been read, and nothing is being read any more. Repeated until answered; idempotent by key."""

    key: Key


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """Sender: the blocks were the transfer's own until Released came: what was read is right."""

    key: Key


class Writing(msgspec.Struct, frozen=True, tag="writing"):
    """Sender: a hint that a write is being posted. Some transports move bytes only while the receiver polls them
    too, and a receiver need not poll before."""

    key: Key


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Sender: a hint that every write has been done. The notice is the authority. While `nbytes` were written,
    something was in flight for `wire_s`; 0 when that is not known (any more)."""

    key: Key
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    wire_s: _Clock = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Sender: nothing is in flight and nothing will be written any more."""

    key: Key
    reason: Reason
    detail: _Text


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Receiver: give this transfer up. Repeated until answered; idempotent by key."""

    key: Key
    reason: Reason


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """Sender: nothing is in flight and nothing ever will be, whatever arrives later."""

    key: Key


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """Sender: closed, but posted writes are still in flight; Drained follows."""

    key: Key


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Sender: the last posted write has stopped; nothing will be written any more."""

    key: Key


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Receiver: how many of these tokens are kept under this key? Repeated until answered."""

    key: Key
    digests: Annotated[Digests, msgspec.Meta(max_length=MAX_DIGEST_BYTES)]


class Holds(msgspec.Struct, frozen=True, tag="holds"):
    """Sender: so many, 0 for an unknown key. The asking process may register as many."""

    key: Key
    tokens: Annotated[int, msgspec.Meta(ge=0)]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Receiver: I am alive and still want these.

    `echo` is the latest `clock` that the sender told us. Their leases begin anew at that time of the sender's
    clock, not when this arrives: however long this is under way, a lease ends at most `lease_s` after the
    receiver last heard the sender, which is what makes a quarantine of known length safe (R1).
    """

    echo: _Clock
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)]


class End(msgspec.Struct, frozen=True, array_like=True):
    """How a transfer ended at the sender."""

    key: Key
    outcome: Outcome
    reason: Reason


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Sender: the answer to a heartbeat. `unknown` were never heard of here; `ended` are over."""

    clock: _Clock
    unknown: tuple[Key, ...]
    ended: tuple[End, ...]


Message = (
    Hello
    | Welcome
    | Refuse
    | Interest
    | Begun
    | Register
    | Accepted
    | Offer
    | Released
    | Confirmed
    | Writing
    | Written
    | Failed
    | Cancel
    | Dropped
    | Draining
    | Drained
    | Ask
    | Holds
    | Heartbeat
    | Beat
)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One control message with its envelope."""

    version: int
    source: Epoch
    destination: Epoch
    message: Message


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """Travels with each WRITE, after its data. `parts` is the number of parts, on the last one; else 0. `token`: the
    first one of the answer, on the last part, if the receiver wants it and the sender has sampled it."""

    version: int
    destination: Epoch
    key: Key
    part: int
    parts: int
    token: _Token | None = None


_T = TypeVar("_T", Frame, Notice)


class _Head(msgspec.Struct, array_like=True):
    version: int


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_notices = msgspec.msgpack.Decoder(Notice)
_heads = msgspec.msgpack.Decoder(_Head)


def encode_frame(source: Epoch, destination: Epoch, message: Message) -> bytes:
    """One frame for the control channel."""
    return _encoder.encode(Frame(VERSION, source, destination, message))


def decode_frame(data: bytes) -> Frame:
    """Parse a control frame. Raises RemoteProtocolError: BAD_VERSION or BAD_MESSAGE."""
    return _checked(_frames, data)


def encode_notice(destination: Epoch, key: Key, part: int, parts: int, token: int | None = None) -> bytes:
    """The notice of one WRITE."""
    return _encoder.encode(Notice(VERSION, destination, key, part, parts, token))


def decode_notice(data: bytes) -> Notice:
    """Parse a notice. Raises RemoteProtocolError: BAD_VERSION or BAD_MESSAGE."""
    notice = _checked(_notices, data)
    if notice.part < 0 or notice.parts < 0 or (notice.parts and notice.part != notice.parts - 1):
        raise RemoteProtocolError(Reason.BAD_MESSAGE, f"part {notice.part} of {notice.parts}", "part")
    return notice


def _checked(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        value = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _why(data, error) from None
    if value.version != VERSION:
        raise _version(value.version)
    return value


def _why(data: bytes, error: Exception) -> RemoteProtocolError:
    """A frame of another version need not parse as ours: say so rather than name a field."""
    try:
        head = _heads.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return RemoteProtocolError(Reason.BAD_MESSAGE, str(error))
    if head.version != VERSION:
        return _version(head.version)
    return RemoteProtocolError(Reason.BAD_MESSAGE, str(error))


def _version(theirs: int) -> RemoteProtocolError:
    detail = f"the peer speaks protocol version {theirs}, this side {VERSION}; install the same kvpush on both"
    return RemoteProtocolError(Reason.BAD_VERSION, detail, "version")
