"""Lets clients in, as many as there are: uvloop itself accepts one connection per turn of its loop, and under load a
turn takes milliseconds, so that the last of a hundred new clients would wait for a hundred turns.

Owned by the event loop's thread.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvpush.core.errors import ConfigError
from kvpush.router.config import RouterConfig

logger = logging.getLogger(__name__)

_BACKLOG = 4096
"""Connections that may wait to be accepted. Who finds no place is let in by a later try, after 200 ms or 1 s."""

_AT_A_TIME = 256
_PAUSE_S = 1.0
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@asynccontextmanager
async def listening(config: RouterConfig, serve: Callable[[], asyncio.Protocol]) -> AsyncIterator[str]:
    """Accept inside this block, each connection with a protocol of its own; yields the base URL.

    Raises `ConfigError` when the address cannot be listened on.
    """
    try:
        listeners = [Listener(opened, serve) for opened in await _open(config)]
    except OSError as error:
        problem = f"{config.host}:{config.port} cannot be listened on: {error.strerror or error}"
        raise ConfigError("host/port", problem, "Choose a free port of this machine.") from None
    try:
        host, port = listeners[0].address
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        for listener in listeners:
            listener.close()


async def _open(config: RouterConfig) -> list[socket.socket]:
    """A socket for each address that the host's name stands for."""
    flags, kind = socket.AI_PASSIVE, socket.SOCK_STREAM
    found = await asyncio.get_running_loop().getaddrinfo(config.host, config.port, type=kind, flags=flags)
    opened: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((info[0], info[4]) for info in found):
            shared = config.workers > 1
            opened.append(socket.create_server(address, family=family, backlog=_BACKLOG, reuse_port=shared))
    except OSError:
        for one in opened:
            one.close()
        raise
    return opened


class Listener:
    """One listening socket."""

    def __init__(self, opened: socket.socket, serve: Callable[[], asyncio.Protocol]) -> None:
        self._socket = opened
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        opened.setblocking(False)
        self._loop.add_reader(opened, self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def close(self) -> None:
        """Let nobody else in."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(_AT_A_TIME):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                self._wait_for_room(error)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._start(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._serve, connection)
        except OSError:
            connection.close()  # its client has left already

    def _wait_for_room(self, error: OSError) -> None:
        """Out of file descriptors, or of memory: the clients wait in the kernel."""
        if error.errno not in _NO_ROOM:
            raise error
        logger.error("no connection can be accepted: %s", error.strerror)
        self._loop.remove_reader(self._socket)
        self._pause = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._socket, self._accept)
