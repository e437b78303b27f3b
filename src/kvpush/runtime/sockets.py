"""How kvpush sets its ZeroMQ sockets: every option with the reason for its value. The seam to pyzmq's errors."""

import errno
import itertools
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpush.core.errors import ControlError
from kvpush.core.ids import Address

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_LAST_PORT = 65535  # ZeroMQ takes larger ones modulo 65536


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """Bounds of the control channel. Durations in seconds.

    `max_frame_bytes`: a peer that sends a larger message is disconnected; a registration of a million tokens in
    blocks of 16 takes some 300 KB.
    `queue_frames`: frames that may wait per link and direction; beyond, frames to a peer that does not read are
    dropped, and the protocol repeats what matters.
    `handshake_s`: how long a connection may take to say who it is.
    `connect_s`: how long one TCP connect may take before the next try.
    `keepalive_s`: how often ZeroMQ pings a quiet connection, from its own thread; one that has not answered for three
    times as long is closed, so that a host that is gone without a word is noticed here too.
    `linger_s`: how long last words may take to leave when a link or the channel is closed.
    `max_inbound`: accepted links that are remembered.
    """

    max_frame_bytes: int = 8 * 2**20
    queue_frames: int = 1000
    handshake_s: float = 5.0
    connect_s: float = 2.0
    keepalive_s: float = 5.0
    linger_s: float = 0.2
    max_inbound: int = 4096


def make_context() -> Context:
    """One context, with one I/O thread, per channel: closing it leaves nothing behind."""
    context: Context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 8192)  # two per link; the default allows 500 links
    return context


def make_listener(context: Context, config: ControlConfig) -> Socket:
    """A ROUTER that is not bound yet."""
    router = _make_socket(context, zmq.ROUTER, config)
    router.router_mandatory = True  # say so when a peer is gone or full, instead of dropping silently
    router.backlog = 1024
    return router


def make_dealer(context: Context, config: ControlConfig) -> Socket:
    """A DEALER that is not connected yet."""
    dealer = _make_socket(context, zmq.DEALER, config)
    dealer.immediate = False  # the hello is queued before the connection stands, and is the first to leave
    dealer.connect_timeout = _milliseconds(config.connect_s)
    dealer.reconnect_ivl = 100
    dealer.reconnect_ivl_max = 1000
    return dealer


def _make_socket(context: Context, kind: int, config: ControlConfig) -> Socket:
    socket = context.socket(kind)
    socket.linger = _milliseconds(config.linger_s)
    socket.sndhwm = socket.rcvhwm = config.queue_frames
    socket.maxmsgsize = config.max_frame_bytes
    socket.handshake_ivl = _milliseconds(config.handshake_s)
    socket.heartbeat_ivl = _milliseconds(config.keepalive_s)
    socket.heartbeat_timeout = _milliseconds(config.keepalive_s * 3)
    return socket


def bind(listener: Socket, address: Address) -> Address:
    """Listen; returns the address with the port that was picked. Raises `ControlError`."""
    if not 0 <= address.port <= _LAST_PORT:
        raise ControlError(f"cannot listen on {address}: ports go from 0 (any free one) to {_LAST_PORT}.")
    listener.ipv6 = ":" in address.host
    try:
        listener.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        raise ControlError(f"cannot listen on {address}: {_explain(error, address)}") from None
    return Address(address.host, int(listener.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]))


def _explain(error: zmq.ZMQError, address: Address) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {address.port} is in use. Stop what listens there, choose another port, or 0 for a free one."
        case errno.EADDRNOTAVAIL | errno.ENODEV:
            return f"'{address.host}' is no address of this machine. Name one of its own, or 0.0.0.0 for all."
        case errno.EACCES:
            return f"port {address.port} needs privileges. Choose one above 1023."
        case _:
            return f"{error.strerror}. Give an IP address of this machine."


def connect(dealer: Socket, address: Address) -> None:
    """Begin to connect. Raises `ControlError` when the address cannot be one."""
    if not 0 < address.port <= _LAST_PORT:
        raise ControlError(f"cannot connect to {address}: ports go from 1 to {_LAST_PORT}.")
    dealer.ipv6 = ":" in address.host
    try:
        dealer.connect(f"tcp://{address}")
    except zmq.ZMQError as error:
        raise ControlError(f"cannot connect to {address}: {error.strerror}") from error


_monitors = itertools.count()


def watch(context: Context, socket: Socket, events: int) -> Socket:
    """A socket from which `monitor_events` reads what happens to the connections of `socket`."""
    address = f"inproc://monitor-{next(_monitors)}"  # a closed socket's name is free only some time after
    socket.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 0  # a bounded queue would block ZeroMQ's I/O thread, and with it every link, when it is full
    monitor.connect(address)
    return monitor


def monitor_events(monitor: Socket) -> list[tuple[int, int]]:
    """What has happened since the last call: (event, its value; a file descriptor for DISCONNECTED)."""
    happened: list[tuple[int, int]] = []
    while readable(monitor):
        event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
        happened.append((int(event["event"]), int(event["value"])))
    return happened


def connection_of(part: zmq.Frame) -> int | None:
    """The file descriptor of the connection that a message came by; None where ZeroMQ does not say.

    It does not for peers that speak ZMTP 1.0 or 2.0, as random bytes may seem to.
    """
    try:
        return int(part.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def readable(socket: Socket) -> bool:
    """Whether a receive would return at once. Unlike a receive, it does not let go of the GIL, which a busy engine
    thread may then keep for a whole switch interval."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
