"""A NIXL transport in a process of its own, told over a socket what to do."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from transport.rig import AREA, copy, region, until

from kvpush.core.errors import TransportError
from kvpush.core.ids import OpId, PeerName
from kvpush.transport.base import NoticeArrived, OpDone, TransportEvent

TESTS = Path(__file__).parents[1]
IDLE_S = 0.0005


class Far:
    """One process with a transport and `AREA` bytes of registered memory. `inside` goes before its command line."""

    def __init__(self, name: str, environment: Mapping[str, str], inside: Sequence[str] = ()) -> None:
        self.events: list[TransportEvent] = []
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/far", "AF_UNIX") as listener:
            command = [*inside, sys.executable, "-m", "transport.far", f"{folder}/far", name]
            self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(TESTS), **environment})
            self._ours: Connection = listener.accept()

    @cached_property
    def metadata(self) -> bytes:
        """What others need to reach it."""
        return bytes(self.ask("metadata"))

    @cached_property
    def address(self) -> int:
        """Where its memory is."""
        return int(self.ask("address"))

    def ask(self, what: str, *args: object) -> Any:
        """Have something done (see `_Served`), and wait for its answer; keeps the events that come first."""
        self._ours.send((what, *args))
        while True:
            assert self._ours.poll(90), f"no answer to {what}"
            said = self._ours.recv()
            if not isinstance(said, OpDone | NoticeArrived):
                return said[0]
            self.events.append(said)

    def listen(self) -> None:
        """Take in an event, if there is one soon."""
        if self._ours.poll(0.01):
            self.events.append(self._ours.recv())

    def has(self, event: TransportEvent) -> None:
        """Wait until this has been reported."""
        until(lambda: event in self.events, self.listen, 60)

    def end_of(self, op: int) -> OpDone:
        """Wait until an operation has ended."""

        def ended() -> list[OpDone]:
            return [each for each in self.events if isinstance(each, OpDone) and each.op == OpId(op)]

        until(ended, self.listen, 60)
        return ended()[0]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process, in whatever state it is."""
        self._process.kill()
        self._process.wait()
        self._ours.close()


class _Served:
    """What a process can be asked to do."""

    def __init__(self, name: str) -> None:
        from kvpush.transport.nixl import NixlTransport

        self.transport = NixlTransport(name)
        self.memory = np.zeros(AREA, np.uint8)
        self.transport.register((region(self.memory),), "dram")

    def metadata(self) -> bytes:
        return self.transport.metadata

    def address(self) -> int:
        return self.memory.ctypes.data

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def read(self) -> bytes:
        return self.memory.tobytes()

    def add(self, peer: str, metadata: bytes) -> str:
        """Why it could not, or ""."""
        try:
            self.transport.add_peer(PeerName(peer), metadata)
        except TransportError as error:
            return str(error)
        return ""

    def remove(self, peer: str) -> None:
        self.transport.remove_peer(PeerName(peer))

    def write(self, op: int, peer: str, address: int, runs: list[tuple[int, int, int]], notice: bytes) -> None:
        self.transport.post_write(OpId(op), PeerName(peer), copy(self.memory, address, runs), notice)


def _serve(pipe: Connection, name: str) -> None:
    served = _Served(name)
    while True:
        for event in served.transport.poll():
            pipe.send(event)
        if pipe.poll(IDLE_S):
            try:
                what, *args = pipe.recv()
            except (EOFError, ConnectionResetError):
                return
            pipe.send((getattr(served, what)(*args),))


if __name__ == "__main__":
    _serve(Client(sys.argv[1], "AF_UNIX"), sys.argv[2])
