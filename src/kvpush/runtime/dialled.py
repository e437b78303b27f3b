"""One control link that we have opened."""

import logging
from collections.abc import Callable

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

logger = logging.getLogger("kvpush.control")

_FAILED_HANDSHAKES = 3
"""One connection that ends during its handshake may be a peer that is just ending or starting; three in a row, some
0.5 s, are a peer that will not let us in (it does not say so to one who has another secret), and waiting for a time-out
would only be slower. A handshake that is refused outright is not tried again, by ZeroMQ neither."""


class Dialled:
    """A DEALER, and a monitor that tells when its connection ends.

    ZeroMQ would connect again by itself, to what may be another process by then. Once a connection has stood and
    ended, the link is lost instead: the endpoint opens another one and begins with a hello.
    """

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
        self._address = address
        self._failed_handshakes = 0
        self._stood = False
        self._lost = False
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

    def receive(self, limit: int) -> tuple[list[list[bytes]], bool]:
        """At most `limit` messages, and whether the link is lost. What came before the end comes first."""
        self._follow()
        messages: list[list[bytes]] = []
        while readable(self.dealer):
            if len(messages) == limit:
                return messages, False
            messages.append(self.dealer.recv_multipart(zmq.NOBLOCK))
        return messages, self._lost

    def close(self) -> None:
        """Let go; what is queued may still leave for `linger_s`, in the background."""
        self.dealer.disable_monitor()
        self.monitor.close()
        self.dealer.close()

    def _follow(self) -> None:
        for event, _ in monitor_events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stood = True
            elif event & HANDSHAKE_FAILED:
                self._handshake_failed(event)
            else:
                self._lost |= self._stood

    def _handshake_failed(self, event: int) -> None:
        self._failed_handshakes += 1
        refused = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if not self._lost and (refused or self._failed_handshakes >= _FAILED_HANDSHAKES):
            self._lost = True
            logger.warning("%s does not let us in: do both sides have the same secret?", self._address)
