"""The connections to one engine: those in use, and those that wait for their next request.

A connection is kept for a little less than an engine keeps it (vLLM: 5 s), so that a request is hardly ever written
to one that is being closed. The last one used is the first to be used again, so that a burst's connections can go.
"""

import asyncio
import ssl
from urllib.parse import urlsplit

from kvpush.router.connection import Connection


class ConnectFailed(OSError):
    """There is no connection: the engine has seen nothing."""


class Pool:
    """Owned by the event loop's thread. `host` and `base_path` are what requests must name."""

    def __init__(self, url: str, connect_timeout_s: float, keepalive_s: float) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self.base_path = parts.path
        self._address = (parts.hostname or "", parts.port or 0)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    async def take(self) -> Connection:
        """A connection that nobody uses. Raises `ConnectFailed`."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if self._loop.time() - connection.idle_since < self._keepalive_s:
                return connection
            connection.abort()
        return await self._connect()

    async def _connect(self) -> Connection:
        host, port = self._address
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(lambda: Connection(self), host, port, ssl=self._tls)
        except TimeoutError:
            raise ConnectFailed(f"no connection to {self.host} within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectFailed(f"no connection to {self.host}: {error.strerror or error}") from None
        self._open.add(connection)
        return connection

    def put_back(self, connection: Connection) -> None:
        """It can be used again."""
        connection.idle_since = self._loop.time()
        self._idle[connection] = None
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._keepalive_s, self._sweep)

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def close(self) -> None:
        """End every connection, those in use, too."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in self._open:
            connection.abort()

    def _sweep(self) -> None:
        """Close what has been idle for too long; the dict has the longest idle first."""
        self._sweeper = None
        now = self._loop.time()
        while self._idle:
            oldest = next(iter(self._idle))
            left = oldest.idle_since + self._keepalive_s - now
            if left > 0:
                self._sweeper = self._loop.call_later(left, self._sweep)
                return
            del self._idle[oldest]
            oldest.abort()
