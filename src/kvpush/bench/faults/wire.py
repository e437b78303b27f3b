"""The control links of a simulated world: frames keep their order, and are lost when a connection breaks."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpush.core.errors import RemoteProtocolError
from kvpush.core.events import Counted
from kvpush.core.ids import Address, LinkId
from kvpush.core.messages import decode_frame
from kvpush.runtime.control import Arrival, FrameArrived, LinkLost, LinkRefused

LATENCY_S = 0.001

_NONE = LinkId(0)


@dataclass(frozen=True)
class Fate:
    """What happens to a frame: how often it arrives (0: lost), how much later than others."""

    copies: int = 1
    delay_s: float = 0.0


@dataclass(eq=False)
class _Link:
    """Dialled by one channel, accepted by another as soon as one listens there. A broken one connects again."""

    dialler: "WireChannel"
    link: LinkId
    address: Address
    acceptor: "WireChannel | None" = None
    accepted_as: LinkId = _NONE
    waiting: list[bytes] = field(default_factory=list)

    def at(self, channel: "WireChannel") -> LinkId:
        """What one end calls it."""
        return self.link if channel is self.dialler else self.accepted_as

    def beyond(self, channel: "WireChannel") -> "WireChannel | None":
        """The other end."""
        return self.acceptor if channel is self.dialler else self.dialler


class Wire:
    """All links of a world. `fate` decides what happens to a frame, by the name of its message. `sent` and `read` count
    messages by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.fate: Callable[[str], Fate] = lambda _: Fate()
        self.refuses = False
        self.sent: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self._listening: dict[Address, WireChannel] = {}
        self._links: list[_Link] = []
        self._accepted = 0

    def listen(self, address: Address) -> "WireChannel":
        """A channel there. Who dialled that address before is connected."""
        channel = self._listening[address] = WireChannel(self)
        for link in [link for link in self._links if link.acceptor is None]:
            self._connect(link)
        return channel

    def unplug(self, channel: "WireChannel") -> None:
        """The process of a channel is dead: its connections break, and nobody listens there any more."""
        self._listening = {address: each for address, each in self._listening.items() if each is not channel}
        for link in self._of(channel):
            self._break(link)
        self._links = [link for link in self._links if link.dialler is not channel]

    def cut(self, channel: "WireChannel") -> None:
        """Break all connections of a channel; they come back."""
        for link in self._of(channel):
            self._break(link)
            self._connect(link)

    def inject(self, channel: "WireChannel", frame: bytes) -> bool:
        """Let a frame arrive on each link of a channel; False when it has none."""
        links = [link.at(channel) for link in self._of(channel) if link.acceptor is not None]
        for link in links:
            channel.put(self.clock() + LATENCY_S, FrameArrived(link, frame))
        return bool(links)

    def dial(self, channel: "WireChannel", link: LinkId, address: Address) -> None:
        """Begin to connect."""
        made = _Link(channel, link, address)
        self._links.append(made)
        self._connect(made)

    def hang_up(self, channel: "WireChannel", link: LinkId) -> None:
        """One end forgets a link; what still comes to the end that accepted it, comes under a new name."""
        for made in [made for made in self._of(channel) if made.at(channel) == link]:
            if channel is made.acceptor:
                made.accepted_as = _NONE
            else:
                self._break(made)
                self._links.remove(made)

    def carry(self, channel: "WireChannel", link: LinkId, frame: bytes) -> None:
        """Send a frame, or drop what has nowhere to go."""
        for made in [made for made in self._of(channel) if made.at(channel) == link]:
            if made.acceptor is None:
                made.waiting.append(frame)
            else:
                self._deliver(made, channel, frame)

    def _of(self, channel: "WireChannel") -> list[_Link]:
        return [link for link in self._links if channel in (link.dialler, link.acceptor)]

    def _connect(self, link: _Link) -> None:
        if self.refuses:
            self._links.remove(link)
            link.dialler.put(self.clock() + LATENCY_S, LinkRefused(link.link))
            return
        link.acceptor = self._listening.get(link.address)
        if link.acceptor is not None:
            waiting, link.waiting = link.waiting, []
            for frame in waiting:
                self._deliver(link, link.dialler, frame)

    def _break(self, link: _Link) -> None:
        for end in (link.dialler, link.acceptor):
            if end is not None:
                end.lose(link.at(end), self.clock() + LATENCY_S)
        link.acceptor, link.accepted_as = None, _NONE

    def _deliver(self, link: _Link, source: "WireChannel", frame: bytes) -> None:
        destination, name = link.beyond(source), message_name(frame)
        assert destination is not None
        self.sent[name] += 1
        if destination is link.acceptor and link.accepted_as == _NONE:
            self._accepted -= 1
            link.accepted_as = LinkId(self._accepted)
        fate = self.fate(name)
        for _ in range(fate.copies):
            destination.put(self.clock() + LATENCY_S + fate.delay_s, FrameArrived(link.at(destination), frame))


class WireChannel:
    """A transfer thread's `Channel`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._coming: list[tuple[float, int, Arrival]] = []
        self._put = 0
        self._in_order = 0.0

    def put(self, when: float, arrival: Arrival) -> None:
        """Something arrives, not before what came earlier."""
        self._put += 1
        self._in_order = max(self._in_order, when)
        heapq.heappush(self._coming, (self._in_order, self._put, arrival))

    def lose(self, link: LinkId, when: float) -> None:
        """A connection has ended, and frames on it with it."""
        kept = [each for each in self._coming if not (isinstance(each[2], FrameArrived) and each[2].link == link)]
        heapq.heapify(kept)
        self._coming = kept
        if link != _NONE:
            self.put(when, LinkLost(link))

    @property
    def next_at(self) -> float:
        """When something arrives next."""
        return self._coming[0][0] if self._coming else float("inf")

    # as a `Channel` -------------------------------------------------------------------------------------
    def wake_on(self, fd: int) -> None:
        """Nobody sleeps here."""

    def wait(self, timeout_s: float | None) -> None:
        """Nobody sleeps here."""

    def receive(self, limit: int) -> list[Arrival]:
        """What has arrived by now."""
        arrived: list[Arrival] = []
        while self._coming and self._coming[0][0] <= self._wire.clock():
            arrival = heapq.heappop(self._coming)[2]
            arrived.append(arrival)
            if isinstance(arrival, FrameArrived):
                self._wire.read[message_name(arrival.frame)] += 1
        return arrived

    def take_counted(self) -> list[Counted]:
        """Nothing is counted here."""
        return []

    def open_link(self, link: LinkId, address: Address) -> None:
        """Begin to connect."""
        self._wire.dial(self, link, address)

    def close_link(self, link: LinkId) -> None:
        """Forget a link."""
        self._wire.hang_up(self, link)

    def trust_link(self, link: LinkId) -> None:
        """Nobody is a stranger here."""

    def send(self, link: LinkId, frame: bytes) -> None:
        """Send a frame, or drop it."""
        self._wire.carry(self, link, frame)


def message_name(frame: bytes) -> str:
    """The type of a frame's message, "" when it is none."""
    try:
        return type(decode_frame(frame).message).__name__
    except RemoteProtocolError:
        return ""
