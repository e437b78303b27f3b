"""One control link that we have opened."""

from collections.abc import Callable
from enum import Enum

import zmq

from kvpush.core.ids import Address, LinkId
from kvpush.runtime.sockets import (
    HANDSHAKE_FAILED,
    Context,
    ControlConfig,
    Socket,
    connect,
    make_dealer,
    monitor_events,
    readable,
    watch,
)

_FAILED_HANDSHAKES = 4
"""A connection that ends during its handshake may be a peer that is just ending or starting, or a bad network. Four in
a row, some 0.6 s, on a link that has never stood are a peer that will not let us in (it does not say so to one who has
another secret), and waiting for a time-out would only be slower. A handshake that is refused outright is not tried
again, by ZeroMQ neither."""


_EVENTS_PER_TURN = 64


class Standing(Enum):
    """What has become of a link since it was asked last."""

    FINE = "nothing to tell; that there is no connection yet is no news either"
    BROKEN = "a connection has ended, ZeroMQ makes another; frames may be lost, and the peer may be another process"
    REFUSED = "the peer will not let us in"


class Dialled:
    """A DEALER, and a monitor that tells what happens to its connection."""

    def __init__(
        self,
        context: Context,
        link: LinkId,
        address: Address,
        config: ControlConfig,
        identify: Callable[[Socket], None],
    ) -> None:
        """`identify` gives the socket its keys. Raises `ControlError` when `address` cannot be one."""
        self.link = link
        self.address = address
        self._failed_handshakes = 0
        self._connected = False
        self._has_stood = False
        self._standing = Standing.FINE
        self.dealer = make_dealer(context, config)
        identify(self.dealer)
        self.monitor = watch(
            context,
            self.dealer,
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED,
        )
        try:
            connect(self.dealer, address)
        except Exception:
            self.close()
            raise

    def send(self, frame: bytes) -> None:
        """Queue a frame. Raises `zmq.Again` when the queue is full."""
        self.dealer.send(frame, zmq.NOBLOCK)

    def receive(self, limit: int) -> tuple[list[list[bytes]], Standing]:
        """At most `limit` messages, and what has become of the link. What came before its end comes first."""
        for event, _ in monitor_events(self.monitor, _EVENTS_PER_TURN):
            self._follow(event)
        messages: list[list[bytes]] = []
        while readable(self.dealer):
            if len(messages) == limit:
                return messages, Standing.FINE
            messages.append(self.dealer.recv_multipart(zmq.NOBLOCK))
        standing, self._standing = self._standing, Standing.FINE
        return messages, standing

    def close(self) -> None:
        """Let go; what is queued may still leave for `linger_s`, in the background."""
        self.dealer.disable_monitor()
        self.monitor.close()
        self.dealer.close()

    def _follow(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = self._has_stood = True
        elif event & HANDSHAKE_FAILED:
            self._handshake_failed(event)
        elif self._connected:
            self._connected = False
            self._standing = Standing.BROKEN

    def _handshake_failed(self, event: int) -> None:
        self._failed_handshakes += 1
        never = self._failed_handshakes >= _FAILED_HANDSHAKES and not self._has_stood
        if never or event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._standing = Standing.REFUSED
