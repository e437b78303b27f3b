"""HTTP to the engines: requests written, answers judged, and what goes wrong made a `LegFailed`.

Owned by the event loop's thread.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from kvpush.router.answers import Answer, Cause, LegFailed, broken_leg
from kvpush.router.config import RouterConfig
from kvpush.router.connection import BadAnswer, Connection
from kvpush.router.engine import Engine
from kvpush.router.events import EVENT_END
from kvpush.router.pool import ConnectFailed, Pool

_MAX_ANSWER_BYTES = 256 * 1024 * 1024
_JSON = "application/json"
_LAST_EVENT = b"data: [DONE]\n\n"
ERROR_EVENT = b'data: {"error":'
"""vLLM answers 200 to a stream before the request has run; this is how it says that it then failed."""
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


class Upstream:
    """Connections to all engines. Make it inside the running loop; close it there."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._pools: dict[str, Pool] = {}

    def close(self) -> None:
        """Close every connection."""
        for pool in self._pools.values():
            pool.close()

    async def metrics_page(self, engine: Engine, timeout_s: float) -> str:
        """The engine's `/metrics`. Raises `LegFailed`."""
        with mapped(engine):
            async with asyncio.timeout(timeout_s):
                answer = await self._whole(engine, "GET", "/metrics", None, {})
                return answer.body.decode(errors="replace")

    async def whole(self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post and read the whole answer, status 2xx. Raises `LegFailed`."""
        with mapped(engine):
            return await self._whole(engine, "POST", path, body, headers)

    async def stream(self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]) -> "Stream":
        """Post and wait for the first byte of a 2xx answer's body. Raises `LegFailed`."""
        with mapped(engine):
            connection = await self._ask(engine, "POST", path, body, headers)
            try:
                stream = Stream(engine, connection, await connection.read())
                if stream.status // 100 != 2:
                    raise _refused(engine, connection, stream.first + await _read_bounded(connection))
                if stream.is_events and stream.first.startswith(ERROR_EVENT):
                    raise failed_event(engine, stream.first)
                return stream
            except BaseException:
                connection.release()
                raise

    async def relay(
        self, engine: Engine, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> "Stream":
        """Any request, any status: the first byte of its answer. Raises `LegFailed` when there is none."""
        with mapped(engine):
            connection = await self._ask(engine, method, path, body, headers)
            try:
                return Stream(engine, connection, await connection.read())
            except BaseException:
                connection.release()
                raise

    async def _whole(
        self, engine: Engine, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        connection = await self._ask(engine, method, path, body, headers)
        try:
            content = await _read_bounded(connection)
            if connection.answer.status // 100 != 2:
                raise _refused(engine, connection, content)
            return Answer(connection.answer.status, content, connection.answer.content_type or _JSON)
        finally:
            connection.release()

    async def _ask(
        self, engine: Engine, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Connection:
        pool = self._pools.get(engine.url)
        if pool is None:
            pool = Pool(engine.url, self._config.connect_timeout_s, self._config.keepalive_s)
            self._pools[engine.url] = pool
        connection = await pool.take()
        head = request_head(method, pool.base_path + path, {"Host": pool.host, **headers}, body)
        connection.ask(method, head + (body or b""), self._config.first_byte_timeout_s)
        return connection


def request_head(method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """A request up to its empty line. Raises `ValueError` for a value that would not stay one line."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None or method not in _BODILESS:
        lines.append(f"Content-Length: {len(body or b'')}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a header has a line break in it")
    return text.encode("utf-8", "surrogateescape") + b"\r\n\r\n"


class Stream:
    """An answer whose first bytes are here and whose rest is still coming. Close it."""

    def __init__(self, engine: Engine, connection: Connection, first: bytes) -> None:
        self.engine = engine
        self.status = connection.answer.status
        self.content_type = connection.answer.content_type or _JSON
        self.content_length = connection.answer.content_length
        self.path = connection.answer.path
        self._connection = connection
        self.first = first
        self.last = first

    @property
    def is_events(self) -> bool:
        """True for server-sent events."""
        return self.content_type.startswith("text/event-stream")

    @property
    def is_complete(self) -> bool:
        """True once nothing will come after what was handed over last."""
        return self._connection.answer.is_complete and not self._connection.answer.buffered_bytes

    @property
    def said_done(self) -> bool:
        """True once the last event of OpenAI's streams is here; clients may leave without waiting for more."""
        return self.last.endswith(_LAST_EVENT)

    async def next_chunk(self) -> bytes:
        """More of the body, b"" at its end. Raises `LegFailed` when it breaks off."""
        with mapped(self.engine):
            chunk = await self._connection.read()
        if chunk:
            self.last = chunk
        return chunk

    async def read_rest(self) -> None:
        """Take what is still to come, and throw it away. Raises `LegFailed`."""
        while await self.next_chunk():
            pass

    def close(self) -> None:
        """Stop: the engine sees its client leave unless the answer was complete. Idempotent."""
        self._connection.release()


class mapped:
    """Turn what goes wrong with a connection in a block into `LegFailed`, and look at the engine again at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise _failed(self._engine, error) from None


def _failed(engine: Engine, error: OSError) -> LegFailed:
    """`TimeoutError` is an `OSError`, and so are the pool's and the connection's own."""
    if isinstance(error, TimeoutError):
        return broken_leg(engine.role, engine.url, Cause.TIMEOUT, "it did not answer in time")
    engine.refresh.set()
    cause = Cause.UNREACHABLE if isinstance(error, ConnectFailed) else Cause.BROKEN
    return broken_leg(engine.role, engine.url, cause, _say(error))


def _say(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refused(engine: Engine, connection: Connection, body: bytes) -> LegFailed:
    answer = Answer(connection.answer.status, body, connection.answer.content_type or _JSON)
    return LegFailed(engine.role, engine.url, Cause.REFUSED, answer)


class _Error(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _Error


def failed_event(engine: Engine, first: bytes) -> LegFailed:
    """A stream that begins with an error event, as the answer it would have been without a stream."""
    body = first[len(b"data: ") :].split(EVENT_END, 1)[0]
    try:
        code = msgspec.json.decode(body, type=_ErrorEvent).error.code
    except msgspec.DecodeError:
        code = 500
    return LegFailed(engine.role, engine.url, Cause.REFUSED, Answer(code if 400 <= code < 600 else 500, body))


async def _read_bounded(connection: Connection) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await connection.read():
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise BadAnswer(f"its answer is longer than {_MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)
