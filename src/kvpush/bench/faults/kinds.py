"""What can go wrong, and when: the rows and columns of the matrix."""

from collections.abc import Callable, Mapping
from enum import StrEnum

from kvpush.bench.faults.node import Ending, Node
from kvpush.bench.faults.wire import Fate
from kvpush.bench.faults.world import TIMES, World
from kvpush.core.events import Purpose
from kvpush.core.layout import Span
from kvpush.core.messages import Offer, Register, encode_frame
from kvpush.core.mode import Mode
from kvpush.transport.faults import Fault, FaultKind

BRIEF_S = 0.3
"""Shorter than any time-out."""
LATE_S = 1.5
"""Longer than it takes to find a peer dead, shorter than a transport's own time-out."""
LONG_S = TIMES.lease_s + TIMES.quarantine_s + 1.0
"""Longer than a receiver keeps blocks for a sender that it does not hear of."""


class Moment(StrEnum):
    """Points of a transfer's life, in order."""

    STRANGERS = "strangers"  # the two have never heard of each other
    ASKING = "asking"  # an earlier turn is asked for; only in conversations
    REGISTERING = "registering"  # the registration is under way
    WAITING = "waiting"  # registered; the prefill goes on
    HALF = "half"  # the first half has been written; with pull: the offer is under way
    WRITING = "writing"  # the last write, or the read, is in flight
    WRITTEN = "written"  # all bytes have landed; the receiver has not seen their notices, or has not been confirmed
    DELIVERED = "delivered"  # the receiver has everything

    def has_come(self, world: World) -> bool:
        """Whether the transfer is there."""
        if world.mode is Mode.PULL and self in _HAS_COME_PULL:
            return _HAS_COME_PULL[self](world)
        if world.purpose is Purpose.CONVERSATION and self in _HAS_COME_KEPT:
            return _HAS_COME_KEPT[self](world)
        return _HAS_COME[self](world)

    def is_of(self, mode: Mode, purpose: Purpose) -> bool:
        """Whether such transfers have this moment: what is kept is complete, and is written at once."""
        if purpose is Purpose.PROMPT:
            return self is not Moment.ASKING
        return self is not Moment.HALF or mode is Mode.PULL


_HAS_COME: Mapping[Moment, Callable[[World], bool]] = {
    Moment.STRANGERS: lambda world: True,
    Moment.ASKING: lambda world: bool(world.wire.sent["Ask"]),
    Moment.REGISTERING: lambda world: bool(world.wire.sent["Register"]),
    Moment.WAITING: lambda world: bool(world.wire.read["Accepted"]),
    Moment.HALF: lambda world: world.p.flight.landed == 1,
    Moment.WRITING: lambda world: world.p.flight.landed + world.p.flight.flying == 2,
    Moment.WRITTEN: lambda world: world.p.flight.landed == 2,
    Moment.DELIVERED: lambda world: world.request is not None and world.request.ending is Ending.TEXT,
}

_HAS_COME_PULL: Mapping[Moment, Callable[[World], bool]] = {
    Moment.HALF: lambda world: bool(world.wire.sent["Offer"]),
    Moment.WRITING: lambda world: world.d.flight.flying + world.d.flight.landed == 1,
    Moment.WRITTEN: lambda world: world.d.flight.landed == 1,
}


_HAS_COME_KEPT: Mapping[Moment, Callable[[World], bool]] = {
    Moment.WRITING: lambda world: world.p.flight.landed + world.p.flight.flying == 1,
    Moment.WRITTEN: lambda world: world.p.flight.landed == 1,
}


# the wire -------------------------------------------------------------------------------------------------
def _frames(fate: Fate, *only: str) -> Callable[[World], None]:
    """Something happens to all frames (of some kinds) for a brief time."""

    def strike(world: World) -> None:
        world.wire.fate = lambda name: fate if not only or name in only else Fate()
        world.after(BRIEF_S, lambda: _calm(world))

    return strike


def _silence(world: World) -> None:
    world.wire.fate = lambda _: Fate(copies=0)


def _no_heartbeats(world: World) -> None:
    world.wire.fate = lambda name: Fate(copies=0) if name in ("Heartbeat", "Hello") else Fate()


def _calm(world: World) -> None:
    world.wire.fate = lambda _: Fate()


def _wrong_secret(world: World) -> None:
    world.wire.refuses = True
    world.wire.cut(world.p.channel)


def _bad_frame(world: World) -> bool:
    reached = [world.wire.inject(node.channel, b"\x93\x01garbage") for node in (world.p, world.d)]
    return all(reached)


def _bad_blocks(world: World) -> bool:
    """A registration of the same key for blocks that the receiver does not have, or an offer of such."""
    if world.mode is Mode.PULL:
        offer = Offer(world.key, ((1, 1_000_000),))
        return world.wire.inject(world.d.channel, encode_frame(world.p.epoch, world.d.epoch, offer))
    bad = Register(world.key, Span(0, 8), ((1, 1_000_000),), 0.0)
    return world.wire.inject(world.p.channel, encode_frame(world.d.epoch, world.p.epoch, bad))


# processes ------------------------------------------------------------------------------------------------
def _on(which: str, happens: Callable[[World, Node], object]) -> Callable[[World], None]:
    def strike(world: World) -> None:
        happens(world, world.p if which == "p" else world.d)

    return strike


def _hang(seconds: float) -> Callable[[World, Node], None]:
    def strike(world: World, node: Node) -> None:
        node.hung = True
        world.after(seconds, node.resume)

    return strike


def _kill(world: World, node: Node) -> None:
    world.kill(node)


def _restart(world: World, node: Node) -> None:
    world.kill(node)
    world.after(0.05, lambda: world.replace(node))


def _fault(which: str, kind: FaultKind, polls: int = 30) -> Callable[[World], None]:
    def strike(world: World, node: Node) -> None:
        node.trap.armed = Fault(kind, None, polls)

    return _on(which, strike)


def _post_fault(write: FaultKind, read: FaultKind, polls: int = 30) -> Callable[[World], None]:
    """The fault befalls whoever posts."""

    def strike(world: World) -> None:
        world.poster.trap.armed = Fault(write if world.mode is Mode.PUSH else read, None, polls)

    return strike


def _with_late_write(strike: Callable[[World], object]) -> Callable[[World], bool]:
    """What is in flight when the fault strikes lands long after it: nothing posted can be called back."""

    def strike_and_delay(world: World) -> bool:
        is_flying = world.poster.flight.delay(LATE_S)
        strike(world)
        return is_flying

    return strike_and_delay


_FOREVER_S = 1e6

KINDS: Mapping[str, Callable[[World], object]] = {
    "nothing": lambda world: None,
    # the control plane
    "frames lost": _frames(Fate(copies=0)),
    "frames twice": _frames(Fate(copies=2)),
    "frames late": _frames(Fate(delay_s=BRIEF_S)),
    "answers lost": _frames(
        Fate(copies=0), "Accepted", "Offer", "Confirmed", "Failed", "Dropped", "Drained", "Written"
    ),
    "hints lost": _frames(Fate(copies=0), "Writing", "Written"),
    "link cut": lambda world: world.wire.cut(world.d.channel),
    "silence": _silence,
    "heartbeats lost": _no_heartbeats,
    "wrong secret": _wrong_secret,
    "bad frame": _bad_frame,
    "bad blocks": _bad_blocks,
    # the engines
    "cancel": lambda world: world.d.abort(world.key),
    "withdraw": lambda world: world.withdraw(),
    # the processes
    "sender killed": _on("p", _kill),
    "sender restarted": _on("p", _restart),
    "sender hung": _on("p", _hang(_FOREVER_S)),
    "sender hung briefly": _on("p", _hang(BRIEF_S)),
    "sender hung long": _on("p", _hang(LONG_S)),
    "sender stopped": _on("p", lambda _, node: node.stop()),
    "receiver killed": _on("d", _kill),
    "receiver restarted": _on("d", _restart),
    "receiver hung": _on("d", _hang(_FOREVER_S)),
    "receiver hung briefly": _on("d", _hang(BRIEF_S)),
    "receiver hung long": _on("d", _hang(LONG_S)),
    "receiver stopped": _on("d", lambda _, node: node.stop()),
    # the data plane
    "silence, write late": _with_late_write(_silence),
    "sender killed, write late": _with_late_write(_on("p", _kill)),
    "sender restarted, write late": _with_late_write(_on("p", _restart)),
    "sender hung, write late": _with_late_write(_on("p", _hang(_FOREVER_S))),
    "cancel, write late": _with_late_write(lambda world: world.d.abort(world.key)),
    "wrong secret, write late": _with_late_write(_wrong_secret),
    "add_peer fails": _post_fault(FaultKind.ADD_PEER_FAILS, FaultKind.ADD_PEER_FAILS),
    "post raises": _post_fault(FaultKind.POST_RAISES, FaultKind.READ_RAISES),
    "write fails": _post_fault(FaultKind.WRITE_FAILS, FaultKind.READ_FAILS),
    "write torn": _post_fault(FaultKind.WRITE_TORN, FaultKind.READ_TORN),
    "write late": _post_fault(FaultKind.WRITE_LATE, FaultKind.READ_LATE),
    "write stuck": _post_fault(FaultKind.WRITE_STUCK, FaultKind.READ_STUCK),
    "completion late": _post_fault(FaultKind.DONE_LATE, FaultKind.READ_LATE),
    # push only
    "notice lost": _fault("d", FaultKind.NOTICE_LOST),
    "notice twice": _fault("d", FaultKind.NOTICE_TWICE),
    "notice late": _fault("d", FaultKind.NOTICE_LATE),
}
"""How each fault strikes; False says that it cannot at that moment. What is said of writes is true of reads in pull."""
PUSH_ONLY = ("notice lost", "notice twice", "notice late")
