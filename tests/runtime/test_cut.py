"""Control connections that are cut at any moment: frames are lost, transfers are not."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from runtime.proxy import Proxy
from runtime.rig import SECRET, until
from runtime.side import Side, announce, answer, final, new_key, receive

from kvpush.core.events import Outcome, ReceiveEnded
from kvpush.core.ids import Key
from kvpush.transport.memory import MemoryFabric

TOKENS, HERE, THERE = 10, (3, 1, 4), (5, 9, 2)


@dataclass
class World:
    sender: Side
    receiver: Side
    proxy: Proxy

    def register(self, key: Key) -> None:
        self.receiver.submit(receive(key, self.proxy.address, TOKENS, THERE))

    def assert_delivered(self, key: Key) -> None:
        ended = answer(self.receiver, key)
        assert isinstance(ended, ReceiveEnded)
        assert ended.outcome is Outcome.DELIVERED, ended
        answer(self.sender, key)

    def cut_and_reconnect(self) -> None:
        made = self.proxy.connections
        self.proxy.cut()
        until(lambda: self.proxy.connections > made)

    def push(self) -> None:
        key = new_key()
        self.register(key)
        self.sender.submit(final(key, TOKENS, HERE))
        self.assert_delivered(key)


@pytest.fixture(params=[SECRET, ""], ids=["encrypted", "open"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    fabric = MemoryFabric()
    sender = Side("prefill", lambda: fabric.transport("prefill"), request.param)
    receiver = Side("decode", lambda: fabric.transport("decode"), request.param)
    receiver.start()
    proxy = Proxy(sender.start())
    yield World(sender, receiver, proxy)
    receiver.stop()
    proxy.close()
    sender.stop()


def test_next_push_arrives_after_the_connection_was_cut(world: World) -> None:
    for _ in range(5):
        world.push()
        world.proxy.cut()
    world.push()
    assert world.proxy.connections > 1


def test_push_arrives_when_the_connection_is_cut_while_it_waits(world: World) -> None:
    world.push()
    key = new_key()
    world.register(key)
    world.sender.submit(announce(key))
    world.push()  # the registration has arrived
    world.proxy.cut()
    world.sender.submit(final(key, TOKENS, HERE))
    world.assert_delivered(key)


def test_push_arrives_when_the_connection_is_cut_as_it_registers(world: World) -> None:
    world.push()
    for _ in range(20):
        key = new_key()
        world.register(key)
        world.proxy.cut()
        world.sender.submit(final(key, TOKENS, HERE))
        world.assert_delivered(key)


def test_pushes_arrive_while_the_connection_is_cut_again_and_again(world: World) -> None:
    world.push()
    keys = [new_key() for _ in range(200)]
    for number, key in enumerate(keys):
        world.register(key)
        world.sender.submit(final(key, TOKENS, HERE))
        if number % 20 == 0:
            world.cut_and_reconnect()
    for key in keys:
        world.assert_delivered(key)
