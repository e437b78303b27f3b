"""Control channels on real sockets: what arrives, what is dropped, and what strangers can not do."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq
from runtime.rig import LOCAL, Party, nothing_left, pump_until

from kvpush.core.errors import ControlError, LocalProtocolError
from kvpush.core.ids import Address, LinkId
from kvpush.runtime.control import ControlChannel, FrameArrived
from kvpush.runtime.sockets import ControlConfig

LINK = LinkId(1)


class Parties:
    def __init__(self) -> None:
        self._closing = ExitStack()

    def make(self, listen: Address = LOCAL, config: ControlConfig | None = None) -> Party:
        channel = ControlChannel(listen, config=config)
        self._closing.callback(channel.close)
        return Party(channel)

    def close(self) -> None:
        self._closing.close()


@pytest.fixture
def parties() -> Iterator[Parties]:
    with nothing_left():
        parties = Parties()
        yield parties
        parties.close()


@pytest.fixture
def server(parties: Parties) -> Party:
    return parties.make()


@pytest.fixture
def client(parties: Parties) -> Party:
    return parties.make()


def greet(client: Party, server: Party, link: LinkId = LINK) -> LinkId:
    """Open a link and say hello; the server's name for it."""
    client.channel.open_link(link, server.channel.address)
    client.channel.send(link, b"hello")
    before = len(server.frames)
    pump_until(lambda: len(server.frames) > before, server, client)
    return server.frames[-1].link


def test_client_is_heard_and_answered_on_one_link(client: Party, server: Party) -> None:
    inbound = greet(client, server)
    server.channel.send(inbound, b"welcome")
    pump_until(lambda: client.frames, client, server)
    assert inbound < 0
    assert server.received == [b"hello"]
    assert client.frames == [FrameArrived(LINK, b"welcome")]


def test_frames_arrive_whole_and_in_order(client: Party, server: Party) -> None:
    server.channel.trust_link(greet(client, server))
    frames = [bytes([number]) * (number * 1000) for number in range(100)]
    for frame in frames:
        client.channel.send(LINK, frame)
    pump_until(lambda: len(server.frames) == 101, server, client)
    assert server.received == [b"hello", *frames]
    assert len({arrived.link for arrived in server.frames}) == 1


def test_each_client_gets_its_own_link(parties: Parties, server: Party) -> None:
    links = [greet(parties.make(), server) for _ in range(3)]
    assert len(set(links)) == 3


def test_channel_works_over_ipv6(parties: Parties) -> None:
    server = parties.make(Address("::1", 0))
    client = parties.make(Address("::1", 0))
    greet(client, server)
    assert server.channel.address.host == "::1"
    assert server.channel.address.port > 0


def test_channel_says_which_port_is_in_use(parties: Parties, server: Party) -> None:
    with pytest.raises(ControlError, match=rf"port {server.channel.address.port} is in use.*0 for a free one"):
        ControlChannel(server.channel.address)


def test_channel_says_that_an_address_is_not_its_machines(parties: Parties) -> None:
    with pytest.raises(ControlError, match=r"'203\.0\.113\.9' is no address of this machine"):
        ControlChannel(Address("203.0.113.9", 0))


@pytest.mark.parametrize("listen", [Address("127.0.0.1", 70000), Address("no host", 0)])
def test_channel_refuses_what_is_no_address(listen: Address) -> None:
    with nothing_left(), pytest.raises(ControlError, match="cannot listen on"):
        ControlChannel(listen)


@pytest.mark.parametrize("address", [Address("no host", 80), Address("127.0.0.1", 0), Address("127.0.0.1", 70000)])
def test_link_to_what_is_no_address_is_refused_at_once(client: Party, address: Address) -> None:
    client.channel.open_link(LINK, address)
    client.channel.send(LINK, b"hello")
    client.pump()
    assert client.refused == [LINK]
    assert client.counted == ["control_frame_dropped peer_lost"]


def test_hello_reaches_a_server_that_starts_later(parties: Parties, client: Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = Address("127.0.0.1", reserved.getsockname()[1])
    client.channel.open_link(LINK, address)
    client.channel.send(LINK, b"hello")
    for _ in range(100):
        client.pump()
    server = parties.make(address)
    pump_until(lambda: server.received == [b"hello"], server, client)
    assert not client.lost


def test_both_sides_learn_that_a_connection_has_ended(parties: Parties, server: Party) -> None:
    client = Party(ControlChannel(LOCAL))
    inbound = greet(client, server)
    client.channel.close()
    pump_until(lambda: server.lost, server)
    assert server.lost == [inbound]

    client = parties.make()
    gone = Party(ControlChannel(LOCAL))
    greet(client, gone)
    gone.channel.close()
    pump_until(lambda: client.lost, client)
    assert client.lost == [LINK]


def test_last_words_come_before_the_end_of_the_link(parties: Parties) -> None:
    server, client = Party(ControlChannel(LOCAL)), parties.make()
    inbound = greet(client, server)
    server.channel.send(inbound, b"failed")
    server.channel.close()
    pump_until(lambda: client.lost, client)
    assert client.received == [b"failed"]


def test_link_connects_again_to_a_server_that_has_restarted(parties: Parties) -> None:
    server, client = Party(ControlChannel(LOCAL)), parties.make()
    greet(client, server)
    server.channel.close()
    pump_until(lambda: client.lost == [LINK], client)
    client.channel.send(LINK, b"still there?")
    restarted = parties.make(server.channel.address)
    pump_until(lambda: restarted.received == [b"still there?"], client, restarted)
    restarted.channel.send(restarted.frames[0].link, b"another process")
    pump_until(lambda: client.received == [b"another process"], client, restarted)


def test_closed_link_is_forgotten_on_both_sides(client: Party, server: Party) -> None:
    inbound = greet(client, server)
    client.channel.close_link(LINK)
    pump_until(lambda: server.lost == [inbound], server, client)
    client.channel.send(LINK, b"too late")
    server.channel.send(inbound, b"too late")
    server.pump()
    client.pump()
    assert client.counted == server.counted == ["control_frame_dropped peer_lost"]
    assert not client.lost


def test_links_can_be_opened_as_fast_as_others_are_closed(client: Party, server: Party) -> None:
    """A new link must not meet what ZeroMQ has not yet cleared away of an old one."""
    for number in range(300):
        client.channel.open_link(LinkId(1 + number), server.channel.address)
        client.channel.close_link(LinkId(1 + number))
    client.pump()
    assert not client.refused
    greet(client, server, LinkId(1000))


def test_client_that_comes_back_gets_a_new_link(client: Party, server: Party) -> None:
    first = greet(client, server)
    client.channel.close_link(LINK)
    second = greet(client, server, LinkId(2))
    assert second != first
    server.channel.send(second, b"welcome")
    pump_until(lambda: client.frames, client, server)
    assert client.frames == [FrameArrived(LinkId(2), b"welcome")]


def test_peer_that_does_not_read_costs_frames_and_no_time(parties: Parties) -> None:
    config = ControlConfig(queue_frames=10, linger_s=0.01)
    server, client, good = parties.make(config=config), parties.make(config=config), parties.make()
    greet(client, server)
    for _ in range(500):
        client.channel.send(LINK, bytes(100_000))  # beyond what the kernel's buffers take in
        client.pump()
    assert client.counted.count("control_frame_dropped peer_silent") > 100
    good.channel.open_link(LINK, server.channel.address)
    good.channel.send(LINK, b"hello")
    pump_until(lambda: server.received.count(b"hello") == 2, server, good)


def test_server_forgets_the_most_silent_client_when_there_are_too_many(parties: Parties) -> None:
    server = parties.make(config=ControlConfig(max_inbound=2))
    first, second = parties.make(), parties.make()
    silent, talking = greet(first, server), greet(second, server)
    assert greet(second, server, LinkId(7)) != talking
    pump_until(lambda: server.lost, server)
    assert server.lost == [silent]


def test_frame_that_is_too_large_is_not_sent(parties: Parties, server: Party) -> None:
    client = parties.make(config=ControlConfig(max_frame_bytes=1000))
    greet(client, server)
    client.channel.send(LINK, bytes(1001))
    client.pump()
    assert client.counted == ["control_frame_dropped bad_message"]


def test_peer_that_sends_too_large_a_frame_is_disconnected_and_others_are_not(parties: Parties) -> None:
    server = parties.make(config=ControlConfig(max_frame_bytes=1000))
    bad, good = parties.make(), parties.make()
    greet(bad, server)
    greet(good, server)
    bad.channel.send(LINK, bytes(100_000_000 // 64))
    pump_until(lambda: bad.lost, server, bad)
    good.channel.send(LINK, b"still here")
    pump_until(lambda: b"still here" in server.received, server, good)


def test_messages_of_a_wrong_shape_are_refused(server: Party, client: Party) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    with context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{server.channel.address}")
        stranger.send_multipart([b"", b"request"])
        stranger.send_multipart([b"x"] * 50)
        stranger.send_multipart([b""])
        pump_until(lambda: server.frames, server)
    assert server.received == [b""]
    assert server.counted == ["control_message_refused bad_message"] * 2
    greet(client, server)


@pytest.mark.parametrize(
    "garbage", [b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 400, b"\xff\0\0\0\0\0\0\0\x01\x7f"]
)
def test_garbage_on_the_port_harms_nobody(server: Party, client: Party, garbage: bytes) -> None:
    for _ in range(20):
        with socket.create_connection((server.channel.address.host, server.channel.address.port)) as stranger:
            stranger.sendall(garbage)
    greet(client, server)
    assert server.received == [b"hello"]


def test_older_zeromq_is_turned_away_and_costs_others_nothing(server: Party, client: Party) -> None:
    """Random bytes may seem to be one, and what it sends could not be traced to its connection."""
    address = (server.channel.address.host, server.channel.address.port)
    with socket.create_connection(address) as stranger:
        stranger.settimeout(0.001)
        stranger.sendall(b"\x01\0" + b"\x06\0hello" * 3)  # ZMTP 1.0: no greeting, an identity, three messages
        pump_until(lambda: _has_hung_up(stranger), server)
        greet(client, server)
    assert server.received == [b"hello"]


def _has_hung_up(peer: socket.socket) -> bool:
    try:
        return not peer.recv(4096)
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_good_client_is_served_while_five_hundred_hang(server: Party, client: Party) -> None:
    with ExitStack() as hanging:
        for _ in range(500):
            address = (server.channel.address.host, server.channel.address.port)
            hanging.enter_context(socket.create_connection(address, timeout=5))
        greet(client, server)
    assert server.received == [b"hello"]


def test_client_that_hangs_is_disconnected_after_the_handshake_time(parties: Parties) -> None:
    server = parties.make(config=ControlConfig(handshake_s=0.05))
    with socket.create_connection((server.channel.address.host, server.channel.address.port), timeout=5) as hanging:
        while hanging.recv(1000):
            server.pump()
    pump_until(lambda: server.counted, server)
    assert server.counted == ["control_handshake_failed peer_handshake"]


def test_flood_of_one_client_does_not_silence_another(parties: Parties, server: Party) -> None:
    flooding, good = parties.make(), parties.make()
    greet(flooding, server)
    for _ in range(900):
        flooding.channel.send(LINK, b"flood")
    good.channel.open_link(LINK, server.channel.address)
    good.channel.send(LINK, b"good")

    def heard() -> bool:
        for _ in range(50):
            flooding.channel.send(LINK, b"flood")
        return b"good" in server.received

    pump_until(heard, server, good, flooding)


def test_receive_takes_no_more_than_its_limit(client: Party, server: Party) -> None:
    server.channel.trust_link(greet(client, server))
    for _ in range(20):
        client.channel.send(LINK, b"x")
    batches: list[int] = []

    def all_in() -> bool:
        batches.append(len(server.channel.receive(3)))
        return sum(batches) == 20

    pump_until(all_in)
    assert max(batches) == 3


def test_wait_ends_when_a_frame_arrives_or_a_descriptor_is_readable(client: Party, server: Party) -> None:
    greet(client, server)
    client.channel.send(LINK, b"more")
    server.channel.wait(None)
    pump_until(lambda: server.received == [b"hello", b"more"], server)
    wake_fd = os.eventfd(1)
    server.channel.wake_on(wake_fd)
    server.channel.wait(None)
    os.close(wake_fd)


def test_wait_is_never_shorter_than_asked(server: Party) -> None:
    """Rounding down would make a deadline half a millisecond away a busy loop."""
    began = time.monotonic()
    server.channel.wait(0.0105)
    assert time.monotonic() - began >= 0.0105


def test_channel_is_used_by_its_own_thread_only(server: Party) -> None:
    errors: list[BaseException] = []

    def trespass() -> None:
        try:
            server.channel.receive(1)
        except LocalProtocolError as error:
            errors.append(error)

    thread = threading.Thread(target=trespass, name="engine")
    thread.start()
    thread.join()
    assert "receive: called from thread engine" in str(errors)
