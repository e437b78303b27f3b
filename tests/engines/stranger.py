"""Somebody who can reach an engine's control port, and says there what no kvpush would."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import zmq
from engines.harness import EngineProcess

from kvpush.core.ids import Epoch
from kvpush.core.messages import Frame, decode_frame

_ANSWER_MS = 10_000
_PEER = re.compile(r"peer ready peer=(\w+)/\d+@([0-9a-f]+)")


class Stranger:
    """A bare ZeroMQ socket that is connected to one engine."""

    def __init__(self, engine: EngineProcess) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"tcp://{engine.ready.host}:{engine.ready.port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()

    def say(self, *parts: bytes) -> None:
        """Send one message, and wait for nothing."""
        self._socket.send_multipart(parts)

    def says(self, frame: bytes) -> bool:
        """Send one frame; False when nobody takes it soon."""
        taken = bool(self._socket.poll(100, zmq.POLLOUT))
        if taken:
            self._socket.send(frame)
        return taken

    def ask(self, frame: bytes) -> Frame:
        """Send one frame; returns what the engine says next."""
        self.say(frame)
        assert self._socket.poll(_ANSWER_MS), "the engine does not answer"
        return decode_frame(self._socket.recv())


@contextlib.contextmanager
def flooded(engine: EngineProcess) -> Iterator[None]:
    """Inside of the block, somebody sends nonsense as fast as it is taken, on one connection after another."""
    ended = threading.Event()

    def flood() -> None:
        while not ended.is_set():
            with Stranger(engine) as stranger:
                for _ in range(10_000):
                    if ended.is_set() or not stranger.says(b"nonsense"):
                        break

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        yield
    finally:
        ended.set()
        flooding.join()


def shout(engine: EngineProcess, data: bytes) -> None:
    """Bytes that are not even ZeroMQ; returns when the engine has hung up."""
    address = (engine.ready.host, engine.ready.port)
    with socket.create_connection(address, timeout=_ANSWER_MS / 1000) as line, contextlib.suppress(ConnectionError):
        line.sendall(data)
        for _ in _until_closed(line):
            pass


def _until_closed(line: socket.socket) -> Iterator[bytes]:
    while piece := line.recv(4096):
        yield piece


def epoch_of(receiver: EngineProcess, known_by: EngineProcess) -> Epoch:
    """The number of a decode engine's process, which a prefill engine that knows it has logged."""
    found = [
        Epoch(int(number, 16)) for name, number in _PEER.findall(known_by.log_text) if name == receiver.config.name
    ]
    assert found, f"{receiver.config.name} is not known"
    return found[-1]
