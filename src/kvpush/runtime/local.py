"""Between an engine's scheduler and its transfer threads, without the engine's steps: commands down, news up.

One socket per rank, in a folder of its own, which nobody but the engine's user can enter: whoever can speak here can
make the engine use blocks. Nobody waits here, but for a scheduler that has nothing else to do (`SchedulerEnd.wait`).

Down, nothing is lost: the scheduler knows which ranks have a command, and the others get it, and all that follow, with
steps. Up, all that is said is said again with a step, and only that must not be lost: what does not fit into the
socket, or comes before anyone listens, is dropped.
"""

import logging
import os
import select
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvpush.core.commands import Command
from kvpush.core.events import BlocksSafe, Event, Found, Outcome, PrefillBegun, ReceiveEnded, SourceFree

logger = logging.getLogger("kvpush.transfer")

Heard = PrefillBegun | Found | ReceiveEnded
"""What is worth being heard at once. Of receives only those that were delivered: of a failed one vLLM has to be told
with a step."""


class Nudge(msgspec.Struct, frozen=True, tag=True):
    """Something has ended of which only a step can tell: it is worth taking one."""


_encoder = msgspec.msgpack.Encoder()
_news = msgspec.msgpack.Decoder(list[Heard | Nudge])
_command = msgspec.msgpack.Decoder(Command)
_ENDS = (ReceiveEnded, SourceFree, BlocksSafe)
_MOST_BYTES = 128 << 10
"""Of one message. A command names its blocks, some 30,000 of them at most."""
_PER_MESSAGE = 100
_ROOM_BYTES = 4 << 20
"""For what a thread has not taken yet; the kernel grants less, by default enough for some 500 commands."""


class ThreadEnd:
    """The transfer thread's end, owned by it. One scheduler is at the other."""

    def __init__(self) -> None:
        """Raises `OSError` when there is nowhere to put the socket."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvpush-")
        self.path = str(Path(self._folder.name) / "engine")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None
        self._readable = select.epoll()
        self._readable.register(self._listener, select.EPOLLIN)

    @property
    def wake_fd(self) -> int:
        """Readable while there is something to take."""
        return self._readable.fileno()

    def take(self) -> list[Command]:
        """All that the scheduler has said since the last call, in order."""
        commands: list[Command] = []
        try:
            peer = self._peer or self._accept()
            while message := peer.recv(_MOST_BYTES):
                commands += _read(message)
        except BlockingIOError:
            return commands
        except OSError:
            pass  # it has ended without having heard of all
        self._hang_up()
        return commands

    def send(self, events: Iterable[Event]) -> None:
        """Tell what is worth it."""
        events = list(events)
        said: list[Event | Nudge] = [event for event in events if _is_urgent(event)]
        said += [Nudge()] if any(isinstance(event, _ENDS) for event in events) else []
        messages = [_encoder.encode(said[i : i + _PER_MESSAGE]) for i in range(0, len(said), _PER_MESSAGE)]
        try:
            for message in messages:
                (self._peer or self._accept()).send(message)
        except BlockingIOError:
            pass  # nobody listens yet, or does not keep up
        except OSError:
            pass  # it has ended: the next `take` finds out, when all that it has said has been taken

    def _accept(self) -> socket.socket:
        peer, _ = self._listener.accept()
        peer.setblocking(False)
        self._readable.unregister(self._listener)
        self._readable.register(peer, select.EPOLLIN)
        self._peer = peer
        return peer

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._readable.unregister(self._peer)
            self._readable.register(self._listener, select.EPOLLIN)
            self._peer.close()
            self._peer = None

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._readable.close()
        if self._peer is not None:
            self._peer.close()
        self._listener.close()
        self._folder.cleanup()


class SchedulerEnd:
    """The scheduler's end: all ranks of one engine. Any thread, but one at a time."""

    def __init__(self, paths: Iterable[str] = ()) -> None:
        """One path per rank, in their order. A rank whose path is "", or leads nowhere from here (another host), is
        neither heard nor told."""
        paths = list(paths)
        self.ranks = len(paths)
        found = {rank: _connect(path) for rank, path in enumerate(paths) if path}
        self._sockets = {rank: peer for rank, peer in found.items() if peer is not None}
        self._told = set(self._sockets)
        self._readable = select.poll()
        for peer in self._sockets.values():
            self._readable.register(peer, select.POLLIN)

    @property
    def is_whole(self) -> bool:
        """Whether there are ranks, and all of them can be heard."""
        return 0 < self.ranks == len(self._sockets)

    # down -----------------------------------------------------------------------------------------------
    def say(self, command: Command) -> frozenset[int]:
        """Tell all ranks, and return which of them have it. Who cannot be told once is never told again: what follows
        must not overtake it."""
        if not self._told:
            return frozenset()
        message = _encoder.encode(command)
        return frozenset([rank for rank in sorted(self._told) if self._tell(rank, message)])

    def _tell(self, rank: int, message: bytes) -> bool:
        try:
            if len(message) <= _MOST_BYTES:
                self._sockets[rank].send(message)
                return True
            problem = f"a command takes {len(message)} bytes"
        except OSError as error:
            problem = os.strerror(error.errno or 0)
        self._told.discard(rank)
        logger.info("Commands go to rank %d with the engine's steps from now on (%s).", rank, problem)
        return False

    # up -------------------------------------------------------------------------------------------------
    def wait(self, longest_ms: int) -> bool:
        """Wait for something to be said, and return whether something was. Takes nothing."""
        return bool(self._readable.poll(longest_ms))

    def take(self) -> list[Heard]:
        """What has been said since the last call, each event once per rank."""
        if not self._readable.poll(0):
            return []
        return [event for rank in tuple(self._sockets) for event in self._take_from(rank)]

    def _take_from(self, rank: int) -> list[Heard]:
        heard: list[Heard] = []
        try:
            while message := self._sockets[rank].recv(_MOST_BYTES):
                heard += [said for said in _news.decode(message) if not isinstance(said, Nudge)]
        except BlockingIOError:
            return heard
        except OSError:
            pass  # it has ended without having heard of us
        self._drop(rank)
        return heard

    def _drop(self, rank: int) -> None:
        """The rank has ended."""
        self._told.discard(rank)
        peer = self._sockets.pop(rank)
        self._readable.unregister(peer)
        peer.close()

    def close(self) -> None:
        """Say and hear nothing more. Idempotent."""
        for rank in tuple(self._sockets):
            self._drop(rank)


def _read(message: bytes) -> list[Command]:
    """The command in a message. One that is none is a bug of the scheduler's side, and does not end the thread."""
    try:
        return [_command.decode(message)]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.error("The scheduler has said what cannot be understood: %s", error)
        return []


def _is_urgent(event: Event) -> bool:
    return isinstance(event, PrefillBegun | Found) or (
        isinstance(event, ReceiveEnded) and event.outcome is Outcome.DELIVERED
    )


def _connect(path: str) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.setblocking(False)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
    try:
        peer.connect(path)
    except OSError as error:
        logger.info(
            "No direct channel to %s (%s): news comes with the engine's steps.", path, os.strerror(error.errno or 0)
        )
        peer.close()
        return None
    return peer
