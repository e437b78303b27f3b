"""What those can do who reach an open control port and are nobody that we know."""

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import zmq
from runtime.rig import LOCAL, Party, nothing_left, open_fds, pump_until, until
from runtime.side import Side, push, running

from kvpush.core.events import Outcome
from kvpush.core.ids import EngineId, Epoch, LinkId
from kvpush.core.messages import Hello, encode_frame
from kvpush.runtime.control import ControlChannel
from kvpush.runtime.sockets import ControlConfig, hang_up
from kvpush.runtime.strangers import FRAMES_PER_TURN, TRIAL_FRAMES, Allowance
from kvpush.transport.memory import MemoryFabric

LINK = LinkId(1)
KEEPALIVE_S = 0.3
TOKENS, HERE, THERE = 10, (3, 1, 4), (5, 9, 2)
RESET = struct.pack("ii", 1, 0)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + struct.pack(">I", 0)


class Stranger:
    """ZMTP 3.1 by hand, so that nothing is repeated, queued or connected again by itself."""

    def __init__(self, server: Party) -> None:
        self._server = server
        address = server.channel.address
        self.line = socket.create_connection((address.host, address.port))
        self.line.settimeout(0.001)
        self.line.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        pump_until(self._is_let_in, server)

    def _is_let_in(self) -> bool:
        try:
            return b"READY" in self.line.recv(4096)
        except TimeoutError:
            return False

    def say(self, *frames: bytes) -> None:
        self.line.sendall(b"".join(b"\0" + bytes([len(frame)]) + frame for frame in frames))

    def fill(self) -> None:
        """Send until nobody takes any more."""
        with suppress(TimeoutError):
            while True:
                self.say(*[b"nonsense"] * 1000)

    def is_hung_up_on(self) -> bool:
        try:
            return not self.line.recv(4096)
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    def reset(self) -> None:
        """End the connection as one that has crashed does."""
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.line.close()


@pytest.fixture
def server() -> Iterator[Party]:
    with nothing_left():
        party = Party(ControlChannel(LOCAL, config=ControlConfig(keepalive_s=KEEPALIVE_S)))
        yield party
        party.channel.close()


@pytest.fixture
def client() -> Iterator[Party]:
    party = Party(ControlChannel(LOCAL))
    yield party
    party.channel.close()


def meet(client: Party, server: Party) -> None:
    """The server comes to know the client."""
    client.channel.open_link(LINK, server.channel.address)
    client.channel.send(LINK, b"hello")
    pump_until(lambda: b"hello" in server.received, server, client)
    server.channel.trust_link(next(arrived.link for arrived in server.frames if arrived.frame == b"hello"))


def test_stranger_is_heard_for_a_while_and_then_disconnected(server: Party) -> None:
    stranger = Stranger(server)
    with stranger.line:
        stranger.say(*[b"nonsense"] * (TRIAL_FRAMES + 30))
        pump_until(stranger.is_hung_up_on, server)
    pump_until(lambda: server.lost, server)
    assert server.received == [b"nonsense"] * TRIAL_FRAMES
    assert server.counted.count("control_stranger_closed bad_message") == 1


def test_peer_that_is_known_may_say_as_much_as_it_likes(server: Party, client: Party) -> None:
    meet(client, server)
    for _ in range(10 * TRIAL_FRAMES):
        client.channel.send(LINK, b"more")
    pump_until(lambda: server.received.count(b"more") == 10 * TRIAL_FRAMES, server, client)
    assert not server.counted


def test_peer_whose_link_is_closed_is_a_stranger_again(server: Party, client: Party) -> None:
    meet(client, server)
    server.channel.close_link(server.frames[0].link)
    for _ in range(TRIAL_FRAMES + 1):
        client.channel.send(LINK, b"more")
    pump_until(lambda: client.lost, server, client)
    assert server.received.count(b"more") == TRIAL_FRAMES


def test_strangers_get_a_few_frames_of_a_turn_between_them(server: Party) -> None:
    with ExitStack() as lines:
        strangers = [Stranger(server) for _ in range(4)]
        for stranger in strangers:
            lines.enter_context(stranger.line)
            stranger.say(*[b"nonsense"] * TRIAL_FRAMES)
        batches: list[int] = []

        def all_in() -> bool:
            batches.append(len(server.channel.receive(1000)))
            return sum(batches) == 4 * TRIAL_FRAMES

        until(all_in)
    assert max(batches) <= FRAMES_PER_TURN


def test_allowance_of_strangers_is_spent_by_bytes_and_comes_back_with_time() -> None:
    allowance = Allowance(now=50.0)
    admitted = sum(allowance.admits(1 << 20, 50.0) for _ in range(1000))
    assert 0 < admitted < 100
    assert not allowance.admits(1 << 20, 50.0)
    assert allowance.admits(1, 51.0)
    later = sum(allowance.admits(1, 1000.0) for _ in range(100_000))
    assert 100 < later < 10_000


def test_lost_peer_is_noticed_while_a_stranger_never_stops(server: Party, client: Party) -> None:
    meet(client, server)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.reconnect_ivl = 1
        stranger.connect(f"tcp://{server.channel.address}")

        def flood() -> None:
            for _ in range(2 * TRIAL_FRAMES):
                try:
                    stranger.send(b"nonsense", zmq.NOBLOCK)
                except zmq.Again:
                    return

        client.channel.close_link(LINK)
        peer = server.frames[0].link

        def lost() -> bool:
            flood()
            return peer in server.lost

        pump_until(lost, server)


def test_connection_that_is_reset_while_nobody_reads_harms_nobody(server: Party, client: Party) -> None:
    """With ZeroMQ's own heartbeats, this ended the process."""
    strangers = [Stranger(server) for _ in range(5)]
    for stranger in strangers:
        stranger.fill()
        stranger.reset()
    threading.Event().wait(2 * KEEPALIVE_S)  # nobody reads
    meet(client, server)


def test_hanging_up_ends_no_connection_to_another_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        there, _ = listener.accept()
        with there:
            hang_up(there.fileno(), 1)
            hang_up(listener.fileno(), listener.getsockname()[1])
            hang_up(None, listener.getsockname()[1])
            here.sendall(b"still here")
            assert there.recv(100) == b"still here"
            hang_up(there.fileno(), listener.getsockname()[1])
            assert here.recv(100) == b""


# against a whole transfer thread ----------------------------------------------------------------------------
@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    fabric = MemoryFabric()
    sender, receiver = (Side(name, lambda name=name: fabric.transport(name)) for name in ("prefill", "decode"))  # type: ignore[misc]
    with running(sender, receiver):
        yield sender, receiver


def deliver(sender: Side, receiver: Side) -> None:
    assert push(sender, receiver, TOKENS, HERE, THERE).outcome is Outcome.DELIVERED


def _garbage(side: Side, rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.choice([0, 1, 50, 5000])) for _ in range(50)]


def _hellos(side: Side, rng: random.Random) -> list[bytes]:
    """Of ever new receivers, each with a layout that fits."""
    hello = Hello(EngineId(f"x{rng.random()}"), None, side._layout(), b"metadata")
    return [encode_frame(Epoch(rng.getrandbits(62)), Epoch(0), hello) for _ in range(50)]


@pytest.mark.parametrize("nonsense", [_garbage, _hellos])
def test_pushes_arrive_while_strangers_speak_without_end(sides: tuple[Side, Side], nonsense: object) -> None:
    assert callable(nonsense)
    sender, receiver = sides
    deliver(sender, receiver)
    ended = threading.Event()

    def flood() -> None:
        rng = random.Random(3)
        with zmq.Context() as context, ExitStack() as sockets:
            while not ended.is_set():
                dealer = sockets.enter_context(context.socket(zmq.DEALER))
                dealer.linger = 0
                dealer.connect(f"tcp://{sender.address}")
                for frame in nonsense(sender, rng):
                    dealer.send(frame)
                if dealer.poll(20):
                    sockets.pop_all().close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(20):
            deliver(sender, receiver)
    finally:
        ended.set()
        flooding.join()
    deliver(sender, receiver)


def test_connections_that_come_and_go_leave_nothing(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    deliver(sender, receiver)
    before = len(open_fds())
    for _ in range(500):
        socket.create_connection((sender.address.host, sender.address.port)).close()
    deliver(sender, receiver)
    until(lambda: len(open_fds()) <= before)
