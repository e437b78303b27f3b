"""From the transfer threads of an engine straight to its scheduler: what should not wait for the engine's next step.

Everything that is said here is said again with a step, and only that must not be lost. So nobody waits here: what does
not fit into the socket, or comes before anyone listens, is dropped. The socket is a file in a folder of its own, which
nobody but the engine's user can enter: whoever can speak here can make the engine use blocks.
"""

import logging
import os
import select
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvpush.core.events import BlocksSafe, Event, Found, Outcome, PrefillBegun, ReceiveEnded, SourceFree

logger = logging.getLogger("kvpush.transfer")

Heard = PrefillBegun | Found | ReceiveEnded
"""What is worth being heard at once. Of receives only those that were delivered: of a failed one vLLM has to be told
with a step."""


class Nudge(msgspec.Struct, frozen=True, tag=True):
    """Something has ended of which only a step can tell: it is worth taking one."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Heard | Nudge])
_ENDS = (ReceiveEnded, SourceFree, BlocksSafe)
_MOST_BYTES = 64 << 10
_PER_MESSAGE = 100


class Outlet:
    """The transfer thread's end, owned by it. One scheduler listens."""

    def __init__(self) -> None:
        """Raises `OSError` when there is nowhere to put the socket."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvpush-")
        self.path = str(Path(self._folder.name) / "events")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None

    def send(self, events: Iterable[Event]) -> None:
        """Tell what is worth it."""
        events = list(events)
        said: list[Event | Nudge] = [event for event in events if _is_urgent(event)]
        said += [Nudge()] if any(isinstance(event, _ENDS) for event in events) else []
        messages = [_encoder.encode(said[i : i + _PER_MESSAGE]) for i in range(0, len(said), _PER_MESSAGE)]
        try:
            peer = self._peer = self._peer or self._accept()
            for message in messages:
                peer.send(message)
        except BlockingIOError:
            pass  # nobody listens yet, or does not keep up
        except OSError:
            self._hang_up()

    def _accept(self) -> socket.socket:
        peer, _ = self._listener.accept()
        peer.setblocking(False)
        return peer

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._hang_up()
        self._listener.close()
        self._folder.cleanup()


class Inlet:
    """The scheduler's end: all ranks of one engine. Any thread, but one at a time."""

    def __init__(self, paths: Iterable[str] = ()) -> None:
        """A rank whose path is "", or leads nowhere from here (another host), is not heard."""
        paths = list(paths)
        self.ranks = len(paths)
        self._sockets = [found for path in paths if path and (found := _connect(path)) is not None]

    @property
    def is_whole(self) -> bool:
        """Whether there are ranks, and all of them can be heard."""
        return 0 < self.ranks == len(self._sockets)

    def wait(self, longest_ms: int) -> bool:
        """Wait for something to be said, and return whether something was. Takes nothing."""
        poller = select.poll()
        for peer in self._sockets:
            poller.register(peer, select.POLLIN)
        return bool(poller.poll(longest_ms))

    def take(self) -> list[Heard]:
        """What has been said since the last call, each event once per rank."""
        return [event for peer in self._sockets for event in self._take_from(peer)]

    def _take_from(self, peer: socket.socket) -> list[Heard]:
        heard: list[Heard] = []
        try:
            while message := peer.recv(_MOST_BYTES):
                heard += [said for said in _decoder.decode(message) if not isinstance(said, Nudge)]
        except BlockingIOError:
            return heard
        except OSError:
            pass  # it has ended without having heard of us
        self._drop(peer)
        return heard

    def _drop(self, peer: socket.socket) -> None:
        """The rank has ended."""
        self._sockets = [other for other in self._sockets if other is not peer]
        peer.close()

    def close(self) -> None:
        """Listen no more. Idempotent."""
        for peer in list(self._sockets):
            self._drop(peer)


def _is_urgent(event: Event) -> bool:
    return isinstance(event, PrefillBegun | Found) or (
        isinstance(event, ReceiveEnded) and event.outcome is Outcome.DELIVERED
    )


def _connect(path: str) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.setblocking(False)
    try:
        peer.connect(path)
    except OSError as error:
        logger.info(
            "No direct channel to %s (%s): news comes with the engine's steps.", path, os.strerror(error.errno or 0)
        )
        peer.close()
        return None
    return peer
