"""The simulated control channel: links that keep order, and lose what is under way when they break."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpush.core.ids import Address, LinkId
from kvpush.core.messages import Message, decode_frame

if TYPE_CHECKING:
    from core.process import Process
    from core.world import World

LATENCY_S = 0.001
REDIAL_S = 0.1


_NONE = LinkId(0)


@dataclass(frozen=True)
class Fate:
    """What happens to one frame: how often it arrives (0: lost), how much later than others."""

    copies: int = 1
    delay_s: float = 0.0


LOST = Fate(copies=0)
Judge = Callable[["Process", "Process", Message], Fate | None]
"""Sender, destination, message -> what happens to it; None leaves it to the next judge."""


@dataclass(eq=False)
class Link:
    """One connection, dialled by one process and accepted by another. `in_order` is when the last frame in each
    direction arrives: a later one is never earlier."""

    dialler: "Process"
    link: LinkId
    address: Address
    acceptor: "Process | None" = None
    accepted_as: LinkId = _NONE
    is_open: bool = True
    waiting: list[bytes] = field(default_factory=list)
    in_order: dict["Process", float] = field(default_factory=dict)

    def has(self, process: "Process", link: LinkId) -> bool:
        """Whether this is what `process` calls `link`."""
        return (self.dialler, self.link) == (process, link) or (self.acceptor, self.accepted_as) == (process, link)


class Network:
    """All links, and the faults that befall them."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._links: list[Link] = []
        self._accepted = 0
        self.judges: list[Judge] = []
        self.partitions: set[frozenset[Process]] = set()
        self.black_holes: set[Address] = set()

    # for processes --------------------------------------------------------------------------------------
    def dial(self, dialler: "Process", link: LinkId, address: Address) -> None:
        """Begin to connect; goes on until it stands or is closed."""
        made = Link(dialler, link, address)
        self._links.append(made)
        self._world.after(LATENCY_S, lambda: self._connect(made))

    def close(self, process: "Process", link: LinkId) -> None:
        """One side forgets a link. Who accepted it forgets its name only: what still comes has a new one."""
        for made in [made for made in self._links if made.has(process, link)]:
            if process is made.acceptor:
                made.accepted_as = _NONE
                continue
            self._end(made)
            if made.acceptor is not None:
                self._tell_lost(made, made.acceptor)

    def send(self, process: "Process", link: LinkId, frame: bytes) -> None:
        """Send, or drop what has nowhere to go."""
        for made in self._links:
            if made.has(process, link):
                if made.acceptor is None:
                    made.waiting.append(frame)
                else:
                    self._carry(made, process, frame)

    # faults ---------------------------------------------------------------------------------------------
    def cut(self, process: "Process") -> None:
        """Break every connection of a process. Frames on their way to the side that dialled are lost, those on
        their way to the side that accepted may still be read. Who dialled connects again under the same link."""
        for made in [made for made in self._links if process in (made.dialler, made.acceptor)]:
            self._end(made)
            for end in (made.dialler, made.acceptor):
                if end is not None:
                    self._tell_lost(made, end)
            if made.dialler.alive:
                self.dial(made.dialler, made.link, made.address)

    def part(self, one: "Process", other: "Process") -> None:
        """Lose whatever one of them sends to the other, without a word."""
        self.partitions.add(frozenset((one, other)))

    def heal(self) -> None:
        """End all partitions."""
        self.partitions.clear()

    def deliver(self, destination: "Process", link: LinkId, frame: bytes) -> None:
        """A frame arrives now, whatever its link is doing."""
        destination.input(lambda now: destination.endpoint.frame_received(link, frame, now))

    # inside ---------------------------------------------------------------------------------------------
    def _connect(self, made: Link) -> None:
        if not made.is_open or not made.dialler.alive:
            return
        listener = self._world.listening_at(made.address)
        if listener is None or made.address in self.black_holes:
            self._world.after(REDIAL_S, lambda: self._connect(made))
            return
        made.acceptor = listener
        for frame in made.waiting:
            self._carry(made, made.dialler, frame)
        made.waiting.clear()

    def _carry(self, made: Link, source: "Process", frame: bytes) -> None:
        assert made.acceptor is not None
        to_acceptor = source is made.dialler
        destination = made.acceptor if to_acceptor else made.dialler
        fate = self._judge(source, destination, frame)
        arrives = max(self._world.now + LATENCY_S + fate.delay_s, made.in_order.get(destination, 0.0))
        if to_acceptor and made.accepted_as == _NONE:
            self._accepted -= 1
            made.accepted_as = LinkId(self._accepted)
        link = made.accepted_as if to_acceptor else made.link
        for _ in range(fate.copies):
            made.in_order[destination] = arrives
            self._world.at(arrives, lambda: self._arrive(made, destination, link, frame))

    def _judge(self, source: "Process", destination: "Process", frame: bytes) -> Fate:
        if frozenset((source, destination)) in self.partitions:
            return LOST
        message = decode_frame(frame).message
        for judge in self.judges:
            fate = judge(source, destination, message)
            if fate is not None:
                return fate
        return Fate()

    def _arrive(self, made: Link, destination: "Process", link: LinkId, frame: bytes) -> None:
        if destination.alive and (made.is_open or destination is made.acceptor):
            self.deliver(destination, link, frame)

    def _end(self, made: Link) -> None:
        made.is_open = False
        self._links.remove(made)

    def _tell_lost(self, made: Link, end: "Process") -> None:
        link = made.link if end is made.dialler else made.accepted_as
        if end.alive:
            self._world.after(LATENCY_S, lambda: end.input(lambda now: end.endpoint.link_lost(link, now)))
