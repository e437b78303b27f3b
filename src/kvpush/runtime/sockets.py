"""How kvpush sets its ZeroMQ sockets: every option with the reason for its value. The seam to pyzmq's errors."""

import errno
import itertools
import os
import socket as socket_module
import struct
from contextlib import suppress
from dataclasses import dataclass

import zmq

from kvpush.core.errors import ControlError
from kvpush.core.ids import Address

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_EVENT = struct.Struct("=Hi")  # the first frame of a monitor's message: what has happened, and its value
_LAST_PORT = 65535  # ZeroMQ takes larger ones modulo 65536


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """Bounds of the control channel. Durations in seconds.

    `max_frame_bytes`: a peer that sends a larger message is disconnected; a registration of a million tokens in
    blocks of 16 takes some 300 KB.
    `queue_frames`: frames that may wait per link to leave; beyond, frames to a peer that does not read are dropped,
    and the protocol repeats what matters.
    `unread_frames`: frames of an accepted link that ZeroMQ takes in before we read them; the rest stays with the peer.
    `handshake_s`: how long a connection may take to say who it is, and we to let it in: a thread that is short of CPU
    needs seconds.
    `connect_s`: how long one TCP connect may take before the next try.
    `keepalive_s`: how often the kernel asks at the other end of a quiet connection; one that has not answered for three
    times as long is closed, so that a host that is gone without a word is noticed here too.
    `linger_s`: how long last words may take to leave when a link or the channel is closed.
    `max_inbound`: accepted links that are remembered.
    """

    max_frame_bytes: int = 2 * 2**20
    queue_frames: int = 1000
    unread_frames: int = 64
    handshake_s: float = 15.0
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
    router.rcvhwm = config.unread_frames
    return router


def make_dealer(context: Context, config: ControlConfig) -> Socket:
    """A DEALER that is not connected yet."""
    dealer = _make_socket(context, zmq.DEALER, config)
    # A bounded queue can make ZeroMQ abort the process: when it is full, the connection breaks, and stands again before
    # we have read (https://github.com/zeromq/libzmq/issues/3937). Accepted connections do not come back.
    dealer.rcvhwm = 0
    dealer.immediate = False  # the hello is queued before the connection stands, and is the first to leave
    dealer.connect_timeout = _milliseconds(config.connect_s)
    dealer.reconnect_ivl = 100
    dealer.reconnect_ivl_max = 1000
    return dealer


def _make_socket(context: Context, kind: int, config: ControlConfig) -> Socket:
    socket = context.socket(kind)
    socket.linger = _milliseconds(config.linger_s)
    socket.sndhwm = config.queue_frames
    socket.maxmsgsize = config.max_frame_bytes
    socket.handshake_ivl = _milliseconds(config.handshake_s)
    # The kernel's keepalive, because ZeroMQ's own aborts the process ("Assertion failed: !_io_error") when its timer
    # fires on a connection that has been reset while its queue was full: anyone could bring that about.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = max(1, round(config.keepalive_s))
    socket.tcp_keepalive_cnt = 3
    socket.tcp_maxrt = _milliseconds(config.keepalive_s * 3)
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


def monitor_events(monitor: Socket, limit: int) -> list[tuple[int, int]]:
    """What has happened since the last call, at most `limit` of it: (event, its value; a file descriptor for
    DISCONNECTED)."""
    happened: list[tuple[int, int]] = []
    while len(happened) < limit and readable(monitor):
        event, value = _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
        happened.append((event, value))
    return happened


def connection_of(part: zmq.Frame) -> int | None:
    """The file descriptor of the connection that a message came by; None where ZeroMQ does not say.

    It does not for peers that speak ZMTP 1.0 or 2.0, as random bytes may seem to.
    """
    try:
        return int(part.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def hang_up(fd: int | None, port: int) -> None:
    """End the TCP connection `fd`, which ZeroMQ then finds ended. A ROUTER cannot be told to.

    The number may belong to something else by now. What is ended is a connection to our `port`, or nothing: at worst
    that of another peer, which comes back.
    """
    if fd is None:
        return
    with suppress(OSError):
        ours = os.dup(fd)  # stays what it is from here on
        try:
            _shut_down(ours, port)
        finally:
            os.close(ours)


def _shut_down(fd: int, port: int) -> None:
    """Raises `OSError` where there is nothing to shut down."""
    connection = socket_module.socket(fileno=fd)
    try:
        ours = connection.family in (socket_module.AF_INET, socket_module.AF_INET6)
        if ours and connection.getsockname()[1] == port and connection.getpeername():
            connection.shutdown(socket_module.SHUT_RDWR)
    finally:
        connection.detach()


def readable(socket: Socket) -> bool:
    """Whether a receive would return at once. Unlike a receive, it does not let go of the GIL, which a busy engine
    thread may then keep for a whole switch interval."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
