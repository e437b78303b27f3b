"""How clients are let in."""

import asyncio
import socket

import pytest

from kvpush.core.errors import ConfigError
from kvpush.router.config import RouterConfig, parse_engine
from kvpush.router.listener import listening

BURST = 300


def config(port: int = 0, host: str = "127.0.0.1") -> RouterConfig:
    return RouterConfig(prefill=(parse_engine("p:1"),), decode=(parse_engine("d:1"),), host=host, port=port)


class Turns(asyncio.Protocol):
    """Counts the connections, and in how many turns of the loop they came."""

    def __init__(self) -> None:
        self.open = 0
        self.turns: set[int] = set()
        self.turn = 0
        self.all_open = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.open += 1
        self.turns.add(self.turn)
        if self.open == BURST:
            self.all_open.set()

    async def count_turns(self) -> None:
        while not self.all_open.is_set():
            self.turn += 1
            await asyncio.sleep(0)


async def test_burst_of_clients_is_let_in_within_a_few_turns_of_the_loop() -> None:
    turns = Turns()
    async with listening(config(), lambda: turns) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        clients = [socket.create_connection((host, int(port))) for _ in range(BURST)]  # none is accepted meanwhile
        async with asyncio.timeout(10.0):
            await turns.count_turns()
        for client in clients:
            client.close()
    assert len(turns.turns) <= 10


async def test_address_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on: Address already in use"):
            async with listening(config(port), asyncio.Protocol):
                pass


async def test_all_addresses_of_a_name_are_listened_on_and_free_afterwards() -> None:
    async with listening(config(host="localhost"), asyncio.Protocol) as url:
        port = int(url.rpartition(":")[2])
        socket.create_connection(("localhost", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", port))
