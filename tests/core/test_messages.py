"""The wire: golden bytes of every message, and what is not a message."""

from collections.abc import Callable
from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from core.memory import make_layout
from hypothesis import given
from hypothesis import strategies as st

from kvpush.core.digests import Digests
from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.events import Outcome
from kvpush.core.ids import EngineId, Epoch, Key, TransferId
from kvpush.core.layout import Span
from kvpush.core.messages import (
    MAX_KEYS,
    VERSION,
    Accepted,
    Ask,
    Beat,
    Begun,
    Cancel,
    Drained,
    Draining,
    Dropped,
    End,
    Failed,
    Heartbeat,
    Hello,
    Holds,
    Interest,
    Message,
    Refuse,
    Register,
    Welcome,
    Writing,
    Written,
    decode_frame,
    decode_notice,
    encode_frame,
    encode_notice,
)

KEY = Key(TransferId("0123456789abcdef0123456789abcdef"), 2)

MESSAGES: tuple[Message, ...] = (
    Hello(EngineId("d"), EngineId("p"), make_layout(1, 4, 8), b"\x01\x02"),
    Welcome(EngineId("p"), 1.5),
    Refuse(Reason.BAD_BLOCK, "blocks[0]", "id 9 is not in [0, 8)", KEY),
    Interest(KEY),
    Begun(KEY),
    Register(KEY, Span(4, 10), ((3, 1),), 2.25, True),
    Accepted(KEY),
    Writing(KEY),
    Written(KEY),
    Failed(KEY, Reason.LEASE_EXPIRED, "nothing was heard"),
    Cancel(KEY, Reason.ABORTED),
    Dropped(KEY),
    Draining(KEY),
    Drained(KEY),
    Ask(KEY, Digests(b"\x07" * 16)),
    Holds(KEY, 16),
    Heartbeat(2.25, (KEY,)),
    Beat(3.5, (KEY,), (End(KEY, Outcome.DELIVERED, Reason.OK),)),
)

GOLDEN: dict[int, dict[str, str]] = {
    1: {
        "Hello": (
            "9401050685a474797065a568656c6c6fa9656e67696e655f6964a164a577616e7473a170a66c61796f75748ca56d6f64656c"
            "a16da56474797065a7666c6f61743332aa686561645f627974657304ab746f74616c5f686561647301aa686561645f737461"
            "727400a8686561645f656e6401a774705f72616e6b00a774705f73697a6501a66d656d6f7279a46472616da667726f757073"
            "91920408a6706c616e6573929aa66c6179657230a16b00cf00000001000000001004040100a09aa66c6179657230a17600cf"
            "00000001000000801004040100a0a7726567696f6e739193cf0000000100000000cd010000a86d65746164617461c4020102"
        ),
        "Welcome": ("9401050683a474797065a777656c636f6d65a9656e67696e655f6964a170a5636c6f636bcb3ff8000000000000"),
        "Refuse": (
            "9401050685a474797065a6726566757365a6726561736f6ea96261645f626c6f636ba56669656c64a9626c6f636b735b305d"
            "a664657461696cb569642039206973206e6f7420696e205b302c203829a36b657992d9203031323334353637383961626364"
            "65663031323334353637383961626364656602"
        ),
        "Register": (
            "9401050685a474797065a87265676973746572a36b657992d920303132333435363738396162636465663031323334353637"
            "383961626364656602a47370616e92040aa6626c6f636b7391920301a46563686fcb4002000000000000"
        ),
        "Accepted": (
            "9401050682a474797065a86163636570746564a36b657992d920303132333435363738396162636465663031323334353637"
            "383961626364656602"
        ),
        "Writing": (
            "9401050682a474797065a777726974696e67a36b657992d92030313233343536373839616263646566303132333435363738"
            "3961626364656602"
        ),
        "Written": (
            "9401050682a474797065a77772697474656ea36b657992d92030313233343536373839616263646566303132333435363738"
            "3961626364656602"
        ),
        "Failed": (
            "9401050684a474797065a66661696c6564a36b657992d9203031323334353637383961626364656630313233343536373839"
            "61626364656602a6726561736f6ead6c656173655f65787069726564a664657461696cb16e6f7468696e6720776173206865"
            "617264"
        ),
        "Cancel": (
            "9401050683a474797065a663616e63656ca36b657992d9203031323334353637383961626364656630313233343536373839"
            "61626364656602a6726561736f6ea761626f72746564"
        ),
        "Dropped": (
            "9401050682a474797065a764726f70706564a36b657992d92030313233343536373839616263646566303132333435363738"
            "3961626364656602"
        ),
        "Draining": (
            "9401050682a474797065a8647261696e696e67a36b657992d920303132333435363738396162636465663031323334353637"
            "383961626364656602"
        ),
        "Drained": (
            "9401050682a474797065a7647261696e6564a36b657992d92030313233343536373839616263646566303132333435363738"
            "3961626364656602"
        ),
        "Heartbeat": (
            "9401050683a474797065a9686561727462656174a46563686fcb4002000000000000a46b6579739192d92030313233343536"
            "3738396162636465663031323334353637383961626364656602"
        ),
        "Beat": (
            "9401050684a474797065a462656174a5636c6f636bcb400c000000000000a7756e6b6e6f776e9192d9203031323334353637"
            "38396162636465663031323334353637383961626364656602a5656e646564919392d9203031323334353637383961626364"
            "65663031323334353637383961626364656602a964656c697665726564a26f6b"
        ),
        "Notice": "95010692d9203031323334353637383961626364656630313233343536373839616263646566020102",
    },
}
GOLDEN[2] = {name: f"{data[:2]}02{data[4:]}" for name, data in GOLDEN[1].items()} | {
    "Register": (
        "9402050686a474797065a87265676973746572a36b657992d920303132333435363738396162636465663031323334353637"
        "383961626364656602a47370616e92040aa6626c6f636b7391920301a46563686fcb4002000000000000ab77616e74735f74"
        "6f6b656ec3"
    ),
    "Notice": ("96020692d920303132333435363738396162636465663031323334353637383961626364656602010207"),
    "Interest": (
        "9402050682a474797065a8696e746572657374a36b657992d920303132333435363738396162636465663031323334353637"
        "383961626364656602"
    ),
    "Begun": (
        "9402050682a474797065a5626567756ea36b657992d920303132333435363738396162636465663031323334353637383961"
        "626364656602"
    ),
}
GOLDEN[3] = {
    "Ask": (
        "9403050683a474797065a361736ba36b657992d9203031323334353637383961626364656630313233343536373839616263"
        "64656602a764696765737473c41007070707070707070707070707070707"
    ),
    "Holds": (
        "9403050683a474797065a5686f6c6473a36b657992d920303132333435363738396162636465663031323334353637383961"
        "626364656602a6746f6b656e7310"
    ),
}
"""Frames from process 5 to process 6, by version and message, in hexadecimal. When the wire changes, `VERSION` goes up,
its history gets a line, and the bytes of what is new or has changed stand here beside the old ones."""


def golden(kind: str) -> str:
    """The bytes of a message in this version: as in the last one in which they changed, but for the version itself."""
    since = max(version for version, messages in GOLDEN.items() if kind in messages)
    return f"{GOLDEN[since][kind][:2]}{VERSION:02x}{GOLDEN[since][kind][4:]}"


def name(message: Message) -> str:
    return type(message).__name__


def frame(message: Message) -> bytes:
    return encode_frame(Epoch(5), Epoch(6), message)


def test_every_message_has_a_sample_here() -> None:
    assert [name(message) for message in MESSAGES] == [kind.__name__ for kind in get_args(Message)]


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_message_has_the_bytes_of_its_version(message: Message) -> None:
    assert frame(message).hex() == golden(name(message)), "a changed wire needs a new VERSION"


def test_notice_has_the_bytes_of_its_version() -> None:
    assert encode_notice(Epoch(6), KEY, 1, 2, 7).hex() == golden("Notice")


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_message_survives_the_wire(message: Message) -> None:
    parsed = decode_frame(frame(message))
    assert (parsed.version, parsed.source, parsed.destination, parsed.message) == (VERSION, 5, 6, message)


def refusal(data: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_frame(data)
    return caught.value


@pytest.mark.parametrize("version", [0, VERSION + 1, 1 << 40])
def test_other_version_is_named_even_when_the_rest_makes_no_sense_here(version: int) -> None:
    data = msgspec.msgpack.encode([version, {"something": "else"}, 7, "and", "more"])
    error = refusal(data)
    assert (error.reason, error.field) == (Reason.BAD_VERSION, "version")
    assert str(version) in error.detail
    assert str(VERSION) in error.detail


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"hello",
        msgspec.msgpack.encode([VERSION]),
        msgspec.msgpack.encode([VERSION, 1, 2, {"type": "unheard of"}]),
        msgspec.msgpack.encode([VERSION, 1, 2, {"type": "accepted"}]),
        msgspec.msgpack.encode([VERSION, "1", 2, {"type": "accepted", "key": ["a", 0]}]),
        msgspec.msgpack.encode([VERSION, 1, 2, {"type": "accepted", "key": [b"\xff", 0]}]),
        frame(Accepted(KEY)) + b"\x00",
        frame(Accepted(KEY))[:-1],
    ],
)
def test_nonsense_is_a_bad_message(data: bytes) -> None:
    assert refusal(data).reason is Reason.BAD_MESSAGE


def test_text_that_is_too_long_is_a_bad_message() -> None:
    assert refusal(frame(Failed(KEY, Reason.ABORTED, "x" * 2000))).reason is Reason.BAD_MESSAGE


def test_heartbeat_with_too_many_keys_is_a_bad_message() -> None:
    keys = tuple(Key(TransferId("k"), i) for i in range(MAX_KEYS + 1))
    assert refusal(frame(Heartbeat(1.0, keys))).reason is Reason.BAD_MESSAGE


@pytest.mark.parametrize(("part", "parts"), [(-1, 0), (0, -1), (0, 2), (2, 2), (1, 1)])
def test_notice_of_an_impossible_part_is_a_bad_message(part: int, parts: int) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_notice(encode_notice(Epoch(1), KEY, part, parts))


def accept_or_refuse(decode: Callable[[bytes], object], data: bytes) -> None:
    """Whatever comes in, nothing else comes out than a message or a refusal."""
    with suppress(RemoteProtocolError):
        decode(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_parsed_or_refused(data: bytes) -> None:
    accept_or_refuse(decode_frame, data)
    accept_or_refuse(decode_notice, data)


@given(st.sampled_from(MESSAGES), st.data())
def test_frames_with_changed_bytes_are_parsed_or_refused(message: Message, data: st.DataObject) -> None:
    changed = bytearray(frame(message))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    accept_or_refuse(decode_frame, bytes(changed))
