"""A TCP connection between two sides that can be cut, as a network does."""

import socket
import threading
from contextlib import suppress

from kvpush.core.ids import Address


class Proxy:
    """Relays connections to `target` until they are cut; new ones are relayed again, unless it is closed."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listening.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def connections(self) -> int:
        """How many have been made so far, cut ones included."""
        return len(self._threads) // 2

    def cut(self) -> None:
        """End all connections at once."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
                far = socket.create_connection((self._target.host, self._target.port))
            except OSError:
                return
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=_relay, args=(source, sink))
                thread.start()
                self._threads.append(thread)


def _relay(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
