"""What router processes on one port tell each other: which turns of conversations are kept where.

The kernel gives a client's next connection to any of them, so each must know what the others have had answered. One
datagram per turn goes to every other worker (place.py says where). Nothing waits for it: a turn whose datagram was lost
is computed again, which is all that not knowing costs.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from kvpush.core.ids import TransferId
from kvpush.router.place import Place

logger = logging.getLogger(__name__)

_MAX_BYTES = 4096
_AT_A_TIME = 64


class KeptTurn(msgspec.Struct, frozen=True, array_like=True):
    """The engine with this URL keeps what begins so, under the first attempt of this transfer id."""

    beginning: bytes
    transfer_id: TransferId
    engine_url: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KeptTurn)


class Siblings:
    """Owned by the event loop's thread. A worker that is alone has nobody to talk to."""

    def __init__(self, place: Place, on_turn: Callable[[KeptTurn], None]) -> None:
        self._others = [place.turns(number) for number in place.others]
        self._on_turn = on_turn
        self._socket: socket.socket | None = None
        if self._others:
            self._socket = _bound(place.turns(place.number))
            asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def tell(self, turn: KeptTurn) -> None:
        """Tell all others, unless they are too busy to hear, or not there."""
        if self._socket is None:
            return
        data = _encoder.encode(turn)
        for other in self._others:
            with suppress(OSError):
                self._socket.sendto(data, other)

    def _read(self) -> None:
        """Take what has come, but not so much that requests must wait; the loop calls again for the rest."""
        for _ in range(_AT_A_TIME):
            try:
                data = self._socket.recv(_MAX_BYTES) if self._socket is not None else b""
            except BlockingIOError:
                return
            try:
                self._on_turn(_decoder.decode(data))
            except msgspec.DecodeError as error:
                logger.warning("another worker's message makes no sense: %s", error)


def _bound(path: str) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    opened.setblocking(False)
    opened.bind(path)
    return opened
