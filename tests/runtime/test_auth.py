"""Nobody without the shared secret gets a frame in; everybody with it does."""

import socket
from collections.abc import Iterator

import pytest
import zmq
from runtime.rig import LOCAL, SECRET, Party, nothing_left, pump_until

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address, LinkId
from kvpush.runtime.auth import KeyPair, Keys, check_secret, derive_keys
from kvpush.runtime.control import ControlChannel
from kvpush.runtime.sockets import ControlConfig

LINK = LinkId(1)
REFUSED = "control_handshake_failed peer_handshake"


@pytest.fixture
def server() -> Iterator[Party]:
    with nothing_left():
        channel = ControlChannel(LOCAL, SECRET)
        yield Party(channel)
        channel.close()


def dial(address: Address, secret: str) -> Party:
    client = Party(ControlChannel(LOCAL, secret, ControlConfig(linger_s=0.01)))
    client.channel.open_link(LINK, address)
    client.channel.send(LINK, b"hello")
    return client


def test_client_with_the_secret_is_heard_and_answered(server: Party) -> None:
    client = dial(server.channel.address, SECRET)
    pump_until(lambda: server.received == [b"hello"], server, client)
    server.channel.send(server.frames[0].link, b"welcome")
    pump_until(lambda: client.received == [b"welcome"], server, client)
    client.channel.close()


@pytest.mark.parametrize("secret", [SECRET + "r", ""])
def test_client_without_the_secret_is_refused_and_learns_it_soon(server: Party, secret: str) -> None:
    client = dial(server.channel.address, secret)
    pump_until(lambda: client.refused == [LINK], server, client)
    assert not server.received
    assert set(server.counted) == {REFUSED}
    client.channel.close()


def test_client_with_the_secret_is_refused_by_an_open_server() -> None:
    server = Party(ControlChannel(LOCAL))
    client = dial(server.channel.address, SECRET)
    pump_until(lambda: client.refused == [LINK], server, client)
    assert not server.received
    client.channel.close()
    server.channel.close()


def raw_client(address: Address, keys: Keys) -> "tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]":
    context = zmq.Context[zmq.Socket[bytes]]()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.curve_serverkey = keys.server.public
    dealer.curve_publickey, dealer.curve_secretkey = keys.client.public, keys.client.secret
    dealer.connect(f"tcp://{address}")
    dealer.send(b"hello")
    return context, dealer


def test_client_that_knows_only_the_servers_public_key_is_refused(server: Party) -> None:
    own = KeyPair(*zmq.curve_keypair())
    context, dealer = raw_client(server.channel.address, Keys(derive_keys(SECRET).server, own))
    pump_until(lambda: REFUSED in server.counted, server)
    assert not server.received
    dealer.close()
    context.term()


def test_bytes_on_the_wire_are_encrypted() -> None:
    """What a listener on the network sees of a frame."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = dial(Address("127.0.0.1", listening.getsockname()[1]), SECRET)
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + bytes(48))
            greeting = connection.recv(64, socket.MSG_WAITALL)
            hello = connection.recv(4096)
        client.channel.close()
    assert b"CURVE" in greeting
    assert b"HELLO" in hello
    assert derive_keys(SECRET).server.public not in hello
    assert b"hello" not in hello


def test_good_client_is_served_among_many_refused(server: Party) -> None:
    strangers = [dial(server.channel.address, SECRET + "?") for _ in range(20)]
    client = dial(server.channel.address, SECRET)
    pump_until(lambda: server.received == [b"hello"], server, *strangers, client)
    for party in [*strangers, client]:
        party.channel.close()


def test_keys_depend_on_the_secret_and_on_the_end() -> None:
    keys, others = derive_keys(SECRET), derive_keys(SECRET + "!")
    pairs = [keys.server, keys.client, others.server, others.client]
    assert len({pair.secret for pair in pairs} | {pair.public for pair in pairs}) == 8
    assert derive_keys(SECRET) == keys


def test_secret_that_can_be_guessed_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"secret: has 6 characters.*at least 16.*openssl rand -hex 32"):
        check_secret("secret")
    check_secret("")


def test_open_channel_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    ControlChannel(LOCAL).close()
    ControlChannel(LOCAL, SECRET).close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No secret is set" in caplog.text
