"""Callers that are too many, or not whom they say: what an endpoint takes from those that it does not know."""

import pytest
from core.memory import make_layout
from core.world import World

from kvpush.core.effects import AddPeer, CloseLink, SendFrame, TrustLink
from kvpush.core.endpoint import Endpoint
from kvpush.core.errors import Reason
from kvpush.core.events import Counted
from kvpush.core.ids import EngineId, Epoch, LinkId, PeerName
from kvpush.core.inbound import MAX_CALLERS, MAX_LOADING
from kvpush.core.messages import Heartbeat, Hello, Message, Refuse, decode_frame, encode_frame

US = Epoch(1)
NOW = 100.0


class Door:
    """A sender, and those who knock."""

    def __init__(self) -> None:
        world = World()
        self.layout = make_layout(1)
        self.endpoint = Endpoint(world.config, EngineId("p"), US, make_layout(0), b"us")

    def hello(self, number: int, link: int | None = None) -> None:
        """Of one more receiver, by a link of its own unless told otherwise."""
        hello = Hello(EngineId(f"d{number}"), None, self.layout, b"them")
        self.say(LinkId(-number if link is None else link), Epoch(1000 + number), hello, Epoch(0))

    def say(self, link: LinkId, source: Epoch, message: Message, destination: Epoch = US) -> None:
        self.endpoint.frame_received(link, encode_frame(source, destination, message), NOW)

    def load(self, peer: PeerName) -> None:
        self.endpoint.peer_added(peer, "", NOW)

    def meet(self, number: int) -> None:
        """A receiver says hello and is welcomed."""
        self.hello(number)
        (added,) = [effect for effect in self.endpoint.take_effects() if isinstance(effect, AddPeer)]
        self.load(added.peer)

    def counted(self, name: str) -> int:
        return sum(isinstance(event, Counted) and event.name == name for event in self.endpoint.take_events())


@pytest.fixture
def door() -> Door:
    return Door()


def test_link_is_trusted_when_its_peer_has_been_loaded(door: Door) -> None:
    door.hello(1)
    added, *others = door.endpoint.take_effects()
    assert isinstance(added, AddPeer)
    assert not others
    door.load(added.peer)
    assert TrustLink(LinkId(-1)) in door.endpoint.take_effects()


def test_peer_that_comes_back_by_another_link_is_trusted_there(door: Door) -> None:
    door.meet(1)
    door.endpoint.take_effects()
    door.say(LinkId(-50), Epoch(1001), Heartbeat(NOW, ()))
    assert TrustLink(LinkId(-50)) in door.endpoint.take_effects()


def test_second_process_on_a_link_is_refused_and_the_link_is_a_strangers_again(door: Door) -> None:
    door.meet(1)
    door.endpoint.take_effects()
    door.hello(2, link=-1)
    closed, refusal = door.endpoint.take_effects()
    assert closed == CloseLink(LinkId(-1))
    assert isinstance(refusal, SendFrame)
    message = decode_frame(refusal.frame).message
    assert isinstance(message, Refuse)
    assert "another process" in message.detail


def test_few_are_loaded_at_a_time_and_the_others_when_they_say_hello_again(door: Door) -> None:
    for number in range(1, 2 * MAX_LOADING + 1):
        door.hello(number)
    added = [effect.peer for effect in door.endpoint.take_effects() if isinstance(effect, AddPeer)]
    assert len(added) == MAX_LOADING
    assert door.counted("hello_put_off") == MAX_LOADING
    for peer in added:
        door.load(peer)
    door.endpoint.take_effects()
    for number in range(1, 2 * MAX_LOADING + 1):
        door.hello(number)
    again = [effect.peer for effect in door.endpoint.take_effects() if isinstance(effect, AddPeer)]
    assert len(again) == MAX_LOADING
    assert not set(again) & set(added)


def test_more_callers_than_anybody_has_are_refused(door: Door) -> None:
    for number in range(1, MAX_CALLERS + 1):
        door.meet(number)
    door.endpoint.take_effects()
    door.hello(MAX_CALLERS + 1)
    (refusal,) = door.endpoint.take_effects()
    assert isinstance(refusal, SendFrame)
    message = decode_frame(refusal.frame).message
    assert isinstance(message, Refuse)
    assert message.reason is Reason.PEER_HANDSHAKE


def test_peer_that_says_nothing_but_nonsense_is_a_stranger_again(door: Door) -> None:
    door.meet(1)
    door.endpoint.take_effects()

    def effects_of_nonsense(times: int) -> list[object]:
        for _ in range(times):
            door.endpoint.frame_received(LinkId(-1), b"nonsense", NOW)
        return list(door.endpoint.take_effects())

    assert CloseLink(LinkId(-1)) not in effects_of_nonsense(40)
    door.say(LinkId(-1), Epoch(1001), Heartbeat(NOW, ()))
    assert CloseLink(LinkId(-1)) not in effects_of_nonsense(40)
    assert CloseLink(LinkId(-1)) in effects_of_nonsense(40)
