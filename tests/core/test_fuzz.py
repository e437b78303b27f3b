"""Whatever bytes arrive, an endpoint raises nothing, and transfers that are healthy stay so (R5, B68)."""

from typing import Any

import msgspec
import pytest
from core.process import Process
from core.test_messages import MESSAGES
from core.world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvpush.core.events import Outcome
from kvpush.core.ids import EngineId, Epoch, Key, LinkId
from kvpush.core.messages import VERSION, Frame, Hello, Message, encode_frame, encode_notice

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Healthy:
    """A pair with one transfer that waits for its prompt, and one whose write is in flight."""

    def __init__(self) -> None:
        self.world = World()
        self.p, self.d = self.world.pair()
        self.waiting, self.writing = self.world.keys(2)
        self.world.data.holding = lambda _: True
        for key in (self.waiting, self.writing):
            self.p.announce(key)
            self.d.receive(key, self.p, 10)
        self.world.run(0.1)
        self.p.final(self.writing, 10)
        self.world.run(0.1)

    def link(self, process: Process) -> LinkId:
        """A link on which `process` hears the other."""
        if process is self.p:
            return next(iter(self.p.endpoint._inbound._callers.values())).link
        return next(iter(self.d.endpoint._outbound._sessions.values())).link

    def check(self) -> None:
        """Both transfers are delivered."""
        self.world.data.holding = lambda _: False
        for write in self.world.data.in_flight:
            self.world.data.land(write)
        self.p.final(self.waiting, 10)
        self.world.settle(within=2.0)
        outcomes = {self.d.received[key].outcome for key in (self.waiting, self.writing)}
        assert outcomes == {Outcome.DELIVERED}


def hear(healthy: Healthy, process: Process, link: LinkId, data: bytes) -> None:
    process.input(lambda now: process.endpoint.frame_received(link, data, now))


@FEW
@given(st.lists(st.binary(max_size=120), max_size=30), st.booleans())
def test_random_bytes_harm_nothing(frames: list[bytes], at_sender: bool) -> None:
    healthy = Healthy()
    process = healthy.p if at_sender else healthy.d
    for data in frames:
        hear(healthy, process, LinkId(-1234), data)
        process.input(lambda now, data=data: process.endpoint.notice_received(data, now))  # type: ignore[misc]
    healthy.check()


def of_a_stranger(message: Message, key: Key) -> Message:
    """A sample message about a transfer of others. Who says hello as an engine that is known takes its place, which
    only the control channel's secret keeps strangers from."""
    if isinstance(message, Hello):
        return replace(message, engine_id=EngineId("stranger"))
    return replace(message, key=key) if getattr(message, "key", None) is not None else message


@FEW
@given(st.lists(st.sampled_from(MESSAGES), max_size=12), st.integers(0, 2**63))
def test_valid_messages_of_strangers_harm_nothing(messages: list[Message], epoch: int) -> None:
    """On a link of its own, whatever it says about the keys of others."""
    healthy = Healthy()
    for number, message in enumerate(messages):
        key = (healthy.waiting, healthy.writing)[number % 2]
        frame = encode_frame(Epoch(epoch), Epoch(1000 + healthy.p.number), of_a_stranger(message, key))
        hear(healthy, healthy.p, LinkId(-1234), frame)
        hear(healthy, healthy.d, LinkId(-1234), frame)
    healthy.check()


@FEW
@given(st.data())
def test_changed_bytes_of_valid_frames_raise_nothing(data: st.DataObject) -> None:
    """A peer that talks nonsense may lose its own transfers, but ends no thread, and everything ends."""
    healthy = Healthy()
    process, other = data.draw(st.sampled_from([(healthy.p, healthy.d), (healthy.d, healthy.p)]))
    link = healthy.link(process)
    for _ in range(8):
        message = data.draw(st.sampled_from(MESSAGES))
        frame = bytearray(encode_frame(Epoch(1000 + other.number), Epoch(1000 + process.number), message))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        hear(healthy, process, link, bytes(frame))
    healthy.world.data.holding = lambda _: False
    for write in healthy.world.data.in_flight:
        healthy.world.data.land(write)
    healthy.p.withdraw(healthy.waiting)
    healthy.world.settle()


INTEGERS = st.one_of(st.integers(-2, 70), st.integers(-(2**63), 2**63 - 1))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=8), st.binary(max_size=8)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)


@settings(FEW, max_examples=150)
@given(st.sampled_from(MESSAGES), st.data())
def test_fields_with_any_values_raise_nothing(message: Message, data: st.DataObject) -> None:
    """Deeper than changed bytes get: well-formed MessagePack with one field of any kind or size."""
    healthy = Healthy()
    body: dict[str, Any] = msgspec.to_builtins(message)
    name = data.draw(st.sampled_from([field for field in body if field != "type"]))
    body[name] = data.draw(VALUES)
    for process, other in ((healthy.p, healthy.d), (healthy.d, healthy.p)):
        envelope = [VERSION, 1000 + other.number, 1000 + process.number, body]
        hear(healthy, process, healthy.link(process), msgspec.msgpack.encode(envelope))
    healthy.world.run(1.0)


@settings(FEW, max_examples=100)
@given(st.integers(-5, 70), st.integers(-5, 70), st.booleans())
def test_notices_of_impossible_parts_deliver_nothing(part: int, parts: int, ours: bool) -> None:
    """R6: the oracle fails if anything is delivered that is not all there. A notice that is forged well is not told
    from a true one; these are all that can be told."""
    healthy = Healthy()
    key = healthy.waiting if ours else healthy.world.key()
    if parts and part == parts - 1:
        return
    notice = encode_notice(Epoch(1000 + healthy.d.number), key, part, parts)
    healthy.d.input(lambda now: healthy.d.endpoint.notice_received(notice, now))
    healthy.check()


def test_malformed_flood_leaves_a_good_peer_its_answers() -> None:
    """B68: ten thousand of them, and the next transfer is as fast as ever."""
    healthy = Healthy()
    junk = [b"", b"\x00", b"\xc1" * 50, msgspec.msgpack.encode(Frame(VERSION, Epoch(1), Epoch(2), MESSAGES[4]))]
    for number in range(10_000):
        healthy.p.endpoint.frame_received(LinkId(-1 - number), junk[number % 4], healthy.world.now)
    assert healthy.p.endpoint.transfers == 2
    healthy.p.endpoint.take_events()
    healthy.p.endpoint.take_effects()
    healthy.check()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_on_a_link_that_nobody_opened_is_counted(message: Message) -> None:
    healthy = Healthy()
    frame = encode_frame(Epoch(1000 + healthy.p.number), Epoch(1000 + healthy.d.number), message)
    hear(healthy, healthy.d, LinkId(4321), frame)
    assert healthy.d.counts("late_message") == 1
    healthy.check()
