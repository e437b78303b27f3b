"""What is wrong is refused, named and counted, and changes nothing that is right: R5, and commands of our own."""

import msgspec
import pytest
from core.faults import listen
from core.memory import make_layout
from core.process import Process, request_of
from core.world import World

from kvpush.core.commands import Announce, Final, Receive
from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import Outcome
from kvpush.core.ids import EngineId, Epoch, Key, LinkId, RequestId
from kvpush.core.layout import Group, Layout, Span
from kvpush.core.messages import (
    VERSION,
    Accepted,
    Beat,
    Cancel,
    Frame,
    Heartbeat,
    Hello,
    Message,
    Refuse,
    Register,
    encode_frame,
)

STRANGER = LinkId(-77)


@pytest.fixture
def pair(world: World) -> tuple[Process, Process]:
    """Two that know each other."""
    p, d = world.pair()
    transfer(world, p, d)
    world.settle()
    return p, d


def transfer(world: World, p: Process, d: Process) -> None:
    key = world.key()
    d.receive(key, p, 6)
    p.final(key, 6)
    world.run_until(lambda: key in d.received)
    assert d.received[key].outcome is Outcome.DELIVERED


def epoch(process: Process) -> Epoch:
    return Epoch(1000 + process.number)


def tell(p: Process, d: Process, message: Message) -> None:
    """Let `p` hear something on a link of `d`."""
    link = p.endpoint._inbound._callers[epoch(d)].link
    frame = encode_frame(epoch(d), epoch(p), message)
    p.input(lambda now: p.endpoint.frame_received(link, frame, now))


def refusals(world: World) -> list[Message]:
    said: list[Message] = []
    world.judge(listen(said, Refuse))
    return said


# registrations --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("span", "blocks", "field"),
    [
        (Span(0, 8), ((0, 64),), "blocks[0]"),
        (Span(0, 8), ((-1, 3),), "blocks[0]"),
        (Span(0, 8), ((1 << 62, 3),), "blocks[0]"),
        (Span(0, 8), ((3, 3),), "blocks[0]"),
        (Span(0, 8), ((1, 2, 3),), "blocks[0]"),
        (Span(0, 8), ((1,),), "blocks[0]"),
        (Span(0, 8), (), "blocks"),
        (Span(0, 8), ((1, 2), (1, 2)), "blocks"),
        (Span(8, 8), ((),), "span"),
        (Span(8, 4), ((),), "span"),
        (Span(-4, 4), ((1, 2),), "span"),
        (Span(0, 1 << 62), ((1, 2),), "blocks[0]"),
    ],
)
def test_registration_of_impossible_blocks_is_refused_by_field(
    world: World, pair: tuple[Process, Process], span: Span, blocks: tuple[tuple[int, ...], ...], field: str
) -> None:
    """B23: before a descriptor is built. The refusal holds for good, since it frees the receiver's blocks."""
    p, d = pair
    key = world.key()
    p.final(key, 10)
    said = refusals(world)
    written = len(world.data.writes)
    tell(p, d, Register(key, span, blocks, world.now))
    assert [(refusal.key, refusal.field) for refusal in said if isinstance(refusal, Refuse)] == [(key, field)]
    assert p.counts("refused") == 1
    tell(p, d, Register(key, Span(0, 4), ((1,),), world.now))
    world.settle()
    assert key not in p.sources
    assert len(world.data.writes) == written
    transfer(world, p, d)


def test_registration_for_more_than_the_prompt_is_refused_when_the_prompt_is_final(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    key = world.key()
    p.final(key, 10)
    d.receive(key, p, 11)
    world.settle()
    assert d.received[key].reason is Reason.SPAN_NOT_COVERED


def test_second_registration_of_a_key_by_another_receiver_is_refused(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    other = world.start("other")
    key = world.key()
    p.announce(key)
    d.receive(key, p, 10)
    world.run(0.1)
    other.receive(key, p, 10)
    world.run(0.1)
    assert other.received[key].reason is Reason.DUPLICATE_KEY
    p.final(key, 10)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED


def test_second_registration_of_a_key_for_other_blocks_ends_it_once_its_writes_have_stopped(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    key = world.key()
    world.data.holding = lambda _: True
    d.receive(key, p, 8)
    p.final(key, 8)
    world.run(0.1)
    tell(p, d, Register(key, Span(0, 8), ((60, 61),), world.now))
    world.run(1.0)
    assert key not in d.received
    assert p.counted["refused", Reason.DUPLICATE_KEY] == 1
    world.data.land(world.data.in_flight[0])
    world.settle(within=0.1)


def test_registration_replayed_after_its_delivery_writes_nothing(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    command = d.receive(key, p, 8)
    p.final(key, 8)
    world.settle()
    tell(p, d, Register(key, command.span, command.blocks, world.now))
    world.settle()
    assert p.counted["late_message", Reason.RETIRED_TRANSFER] == 1
    assert len([write for write in world.data.writes if write.key == key]) == 1


def test_other_receiver_that_replays_a_delivered_key_fails(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    other = world.start("other")
    key = world.key()
    d.receive(key, p, 8)
    p.final(key, 8)
    world.settle()
    other.receive(key, p, 8)
    world.settle(within=world.config.notice_grace_s + 0.1)
    assert other.received[key].outcome is Outcome.FAILED


def test_cancel_by_another_receiver_is_refused(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    other = world.start("other")
    transfer(world, p, other)
    key = world.key()
    p.announce(key)
    d.receive(key, p, 8)
    world.run(0.1)
    tell(p, other, Cancel(key, Reason.ABORTED))
    assert p.counted["refused", Reason.DUPLICATE_KEY] == 1
    p.final(key, 8)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED


@pytest.mark.parametrize("echo", [float("nan"), float("-inf"), -1.0])
def test_registration_with_an_impossible_echo_holds_nothing(
    world: World, pair: tuple[Process, Process], echo: float
) -> None:
    """A lease that cannot be compared would never end."""
    p, d = pair
    key = world.key()
    tell(p, d, Register(key, Span(0, 4), ((1,),), echo))
    tell(p, d, Heartbeat(echo, (key,)))
    world.run(0.1)
    assert p.endpoint.transfers == 0
    world.settle()


# frames ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("message", [Accepted(Key("k")), Beat(1.0, (), ())], ids=["accepted", "beat"])  # type: ignore[arg-type]
def test_message_of_a_sender_is_refused_by_a_sender(
    world: World, pair: tuple[Process, Process], message: Message
) -> None:
    p, d = pair
    tell(p, d, message)
    assert p.counted["refused", Reason.BAD_MESSAGE] == 1


def test_frame_of_another_version_is_refused_with_both_versions(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    said = refusals(world)
    link = p.endpoint._inbound._callers[epoch(d)].link
    frame = msgspec.msgpack.encode(Frame(VERSION + 1, epoch(d), epoch(p), Heartbeat(1.0, ())))
    p.input(lambda now: p.endpoint.frame_received(link, frame, now))
    (refusal,) = said
    assert isinstance(refusal, Refuse)
    assert (refusal.reason, refusal.field) == (Reason.BAD_VERSION, "version")
    assert f"version {VERSION + 1}, this side {VERSION}" in refusal.detail


def test_stranger_is_told_to_say_hello(world: World, pair: tuple[Process, Process]) -> None:
    p, _ = pair
    frame = encode_frame(Epoch(5), epoch(p), Register(world.key(), Span(0, 4), ((1,),), 1.0))
    p.input(lambda now: p.endpoint.frame_received(STRANGER, frame, now))
    assert p.counted["refused", Reason.PEER_LOST] == 1
    assert p.endpoint.transfers == 0


# layouts --------------------------------------------------------------------------------------------------
def other_layouts() -> dict[str, Layout]:
    base = make_layout(1)
    plane = base.planes[0]
    replace = msgspec.structs.replace
    return {
        "model": replace(base, model="other"),
        "dtype": replace(base, dtype="bfloat16"),
        "head_bytes": replace(base, head_bytes=2),
        "total_heads": replace(base, total_heads=2),
        "memory": replace(base, memory="vram"),
        "tp_size": replace(base, tp_size=2),
        "layers": replace(base, planes=(plane,)),
        "groups[0].block_size": make_layout(1, block_size=3),
        "groups": replace(base, groups=(*base.groups, Group(4, 64))),
    }


@pytest.mark.parametrize("field", other_layouts())
def test_incompatible_receiver_is_refused_by_field_and_both_values(world: World, field: str) -> None:
    """B40, B43: its request fails, both engines live, and the next compatible receiver is served."""
    p, d, good = world.start("p"), world.start("d", other_layouts()[field]), world.start("good")
    key = world.key()
    d.receive(key, p, 4)
    assert world.settle() < 0.1
    assert d.received[key].reason is Reason.INCOMPATIBLE
    assert d.received[key].detail.startswith(f"{field}: the sender has")
    assert not world.data.writes
    transfer(world, p, good)


def test_layout_that_makes_no_sense_is_refused(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    nonsense = msgspec.structs.replace(make_layout(1), groups=(Group(0, 0),))
    frame = encode_frame(Epoch(5), Epoch(0), Hello(EngineId("x"), None, nonsense, b""))
    p.input(lambda now: p.endpoint.frame_received(STRANGER, frame, now))
    assert p.counted["refused", Reason.BAD_MESSAGE] == 1
    transfer(world, p, d)


# our own engine -------------------------------------------------------------------------------------------
def execute(process: Process, command: Announce | Final | Receive) -> None:
    with pytest.raises(LocalProtocolError):
        process.endpoint.execute(command, process.world.now)
    process.input(process.endpoint.tick)


def test_second_receive_of_a_key_is_answered_and_the_first_goes_on(world: World, pair: tuple[Process, Process]) -> None:
    """B12, B45: several requests with one key."""
    p, d = pair
    key = world.key()
    first = d.receive(key, p, 8)
    second = Receive(key, RequestId("other"), p.target, first.span, ((60, 61),))
    with pytest.raises(LocalProtocolError, match="not possible"):
        d.endpoint.execute(second, world.now)
    (answer,) = [event for event in d.endpoint.take_events() if getattr(event, "request_id", "") == "other"]
    assert (answer.outcome, answer.reason) == (Outcome.FAILED, Reason.DUPLICATE_KEY)  # type: ignore[union-attr]
    p.final(key, 8)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED


def test_receive_after_its_key_has_ended_fails(world: World, pair: tuple[Process, Process]) -> None:
    """B12: the engine asks again after the transfer has landed."""
    p, d = pair
    key = world.key()
    d.receive(key, p, 8)
    p.final(key, 8)
    world.settle()
    d.receive(key, p, 8)
    assert d.received[key].reason is Reason.DUPLICATE_KEY
    world.settle()


@pytest.mark.parametrize("expected", [True, False], ids=["expected", "new"])
def test_receive_with_bad_blocks_fails_and_gives_the_source_back(
    world: World, pair: tuple[Process, Process], expected: bool
) -> None:
    p, d = pair
    key = world.key()
    if expected:
        d.expect(key, p)
    p.announce(key)
    p.final(key, 8)
    world.run(0.1)
    command = Receive(key, request_of(key), p.target, Span(0, 8), ((0, 99),))
    d.destinations[key] = msgspec.structs.replace(command, blocks=((),))
    execute(d, command)
    assert d.received[key].reason is Reason.BAD_BLOCK
    assert d.counted["local_error", Reason.BAD_BLOCK] == 1
    if expected:
        world.run(0.1)
        assert key not in p.sources
    world.settle()


def test_receive_of_another_request_than_the_expected_fails(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    d.expect(key, p)
    world.run(0.1)
    with pytest.raises(LocalProtocolError, match="is expected by"):
        d.endpoint.execute(Receive(key, RequestId("other"), p.target, Span(0, 4), ((60,),)), world.now)
    d.endpoint.take_events()
    d.receive(key, p, 8)
    p.final(key, 8)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED


def test_second_prompt_with_a_key_is_freed_at_once_and_the_first_goes_on(
    world: World, pair: tuple[Process, Process]
) -> None:
    p, d = pair
    key = world.key()
    p.final(key, 8)
    with pytest.raises(LocalProtocolError, match="belongs to request"):
        p.endpoint.execute(Final(key, RequestId("other"), 8, ((60, 61),)), world.now)
    assert [getattr(event, "request_id", "") for event in p.endpoint.take_events()][-1] == "other"
    d.receive(key, p, 8)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED


def test_prompt_that_gets_shorter_ends_its_transfer(world: World, pair: tuple[Process, Process]) -> None:
    """A bug of our engine; its blocks come back and the receiver is told."""
    p, d = pair
    key = world.key()
    d.receive(key, p, 12)
    world.run(0.1)
    p.final(key, 8, last=False)
    world.run(0.1)
    p.final(key, 4)
    world.settle(within=1.0)
    assert d.received[key].reason is Reason.INTERNAL


def test_prompt_announced_twice_is_an_error_that_changes_nothing(world: World, pair: tuple[Process, Process]) -> None:
    p, d = pair
    key = world.key()
    p.announce(key)
    execute(p, Announce(key, request_of(key)))
    d.receive(key, p, 8)
    p.final(key, 8)
    world.settle()
    assert d.received[key].outcome is Outcome.DELIVERED
