"""Two endpoints joined without a network: every effect of one is an input of the other, at once."""

from collections import deque

from kvpush.core.commands import Announce, Command, Final, Receive
from kvpush.core.config import ProtocolConfig
from kvpush.core.effects import AddPeer, Effect, OpenLink, Post, SendFrame
from kvpush.core.endpoint import Endpoint
from kvpush.core.ids import Address, EngineId, Epoch, Key, LinkId, RequestId, Target, TransferId
from kvpush.core.layout import Layout, Span

_TARGET = Target(Address("p", 1), EngineId("p"))
_TICK_S = 1e-5
_LINK = LinkId(1)
_BLOCKS = ((0,),)
_TOKENS = 16


class Joined:
    """A sender and a receiver, with one link, in virtual time that moves with each input.

    `inputs` counts what both were given: commands, frames and completions.
    """

    def __init__(self, layout: Layout) -> None:
        config = ProtocolConfig()
        self.sender = Endpoint(config, EngineId("p"), Epoch(1), layout, b"p")
        self.receiver = Endpoint(config, EngineId("d"), Epoch(2), layout, b"d")
        self.inputs = 0
        self.delivered = 0
        self._now = 1.0
        self._opened = 0
        self._open: deque[Key] = deque()
        self._link = {self.receiver: _LINK, self.sender: LinkId(-1)}

    def open(self, count: int) -> None:
        """Announce and register `count` new transfers, up to where only the prompt is missing."""
        for _ in range(count):
            self._opened += 1
            key = Key(TransferId(f"{self._opened:032x}"))
            self._open.append(key)
            request = RequestId(key.transfer_id)
            self._execute(self.sender, Announce(key, request))
            self._execute(self.receiver, Receive(key, request, _TARGET, Span(0, _TOKENS), _BLOCKS))

    def deliver_oldest(self) -> None:
        """The oldest open transfer's prompt becomes final: it is written, noticed and ends on both sides."""
        key = self._open.popleft()
        self._execute(self.sender, Final(key, RequestId(key.transfer_id), _TOKENS, _BLOCKS))
        self.delivered += 1

    def _execute(self, endpoint: Endpoint, command: Command) -> None:
        endpoint.execute(command, self._tick())
        self._settle()

    def _tick(self) -> float:
        self.inputs += 1
        self._now += _TICK_S
        return self._now

    def _settle(self) -> None:
        busy = True
        while busy:
            busy = False
            for endpoint, other in ((self.sender, self.receiver), (self.receiver, self.sender)):
                for effect in endpoint.take_effects():
                    busy = True
                    self._apply(endpoint, other, effect)
                endpoint.take_events()

    def _apply(self, endpoint: Endpoint, other: Endpoint, effect: Effect) -> None:
        match effect:
            case SendFrame(_, frame):
                other.frame_received(self._link[other], frame, self._tick())
            case AddPeer(peer, _):
                endpoint.peer_added(peer, "", self._tick())
            case Post(op, _, _, notice):
                endpoint.op_finished(op, "", self._tick())
                other.notice_received(notice, self._tick())
            case OpenLink(link, _):
                self._link[endpoint] = link
            case _:
                pass
