"""HTTP to the engines: the one place that knows aiohttp's client and maps its exceptions.

Owned by the event loop's thread. Connections are kept for a little less than an engine keeps them (vLLM:
5 s), so that a request is hardly ever written to a connection that is being closed.
"""

from collections.abc import Mapping

import aiohttp
import msgspec

from kvpush.router.answers import Answer, Cause, LegFailed, broken_leg
from kvpush.router.config import RouterConfig
from kvpush.router.engine import Engine

_MAX_ANSWER_BYTES = 256 * 1024 * 1024
_JSON = "application/json"
_LAST_EVENT = b"data: [DONE]\n\n"
ERROR_EVENT = b'data: {"error":'
"""vLLM answers 200 to a stream before the request has run; this is how it says that it then failed."""


class Upstream:
    """A client session for all engines. Make it inside the running loop; close it there."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=config.keepalive_s, ttl_dns_cache=30)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout_s, sock_read=config.first_byte_timeout_s
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def metrics_page(self, engine: Engine, timeout_s: float) -> str:
        """The engine's `/metrics`. Raises `LegFailed`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with mapped(engine):
            async with self._session.get(engine.url + "/metrics", timeout=timeout) as response:
                if response.status != 200:
                    raise _refused(engine, response, await response.read())
                return await response.text()

    async def whole(self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post and read the whole answer, status 2xx. Raises `LegFailed`."""
        with mapped(engine):
            async with self._session.post(engine.url + path, data=body, headers=headers) as response:
                content = await _read_bounded(response)
                if response.status // 100 != 2:
                    raise _refused(engine, response, content)
                return Answer(response.status, content, response.headers.get("Content-Type", _JSON))

    async def stream(self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]) -> "Stream":
        """Post and wait for the first byte of a 2xx answer's body. Raises `LegFailed`."""
        with mapped(engine):
            response = await self._session.post(engine.url + path, data=body, headers=headers)
            try:
                if response.status // 100 != 2:
                    raise _refused(engine, response, await _read_bounded(response))
                stream = Stream(engine, response, await response.content.readany())
                if stream.is_events and stream.first.startswith(ERROR_EVENT):
                    raise failed_event(engine, stream.first)
                return stream
            except BaseException:
                response.close()
                raise

    async def relay(
        self, engine: Engine, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> "Stream":
        """Any request, any status: the first byte of its answer. Raises `LegFailed` when there is none."""
        with mapped(engine):
            response = await self._session.request(
                method, engine.url + path, data=body, headers=headers, allow_redirects=False
            )
            try:
                return Stream(engine, response, await response.content.readany())
            except BaseException:
                response.close()
                raise


class Stream:
    """An answer whose first bytes are here and whose rest is still coming. Close it."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.engine = engine
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", _JSON)
        self.content_length = response.headers.get("Content-Length")
        self._response = response
        self.first = first
        self.last = first

    @property
    def is_events(self) -> bool:
        """True for server-sent events."""
        return self.content_type.startswith("text/event-stream")

    @property
    def said_done(self) -> bool:
        """True once the last event of OpenAI's streams is here; clients may leave without waiting for more."""
        return self.last.endswith(_LAST_EVENT)

    async def next_chunk(self) -> bytes:
        """More of the body, b"" at its end. Raises `LegFailed` when it breaks off."""
        with mapped(self.engine):
            chunk = await self._response.content.readany()
        if chunk:
            self.last = chunk
        return chunk

    async def read_rest(self) -> None:
        """Take what is still to come, and throw it away. Raises `LegFailed`."""
        while await self.next_chunk():
            pass

    def close(self) -> None:
        """Stop: the engine sees its client leave unless the answer was complete. Idempotent."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class mapped:
    """Turn the client's exceptions in a block into `LegFailed`, and look at the engine again at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (aiohttp.ClientError, OSError)):
            raise _failed(self._engine, error) from None


def _failed(engine: Engine, error: Exception) -> LegFailed:
    """`TimeoutError` is an `OSError`."""
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        engine.refresh.set()
        return broken_leg(engine.role, engine.url, Cause.UNREACHABLE, _say(error))
    if isinstance(error, TimeoutError):
        return broken_leg(engine.role, engine.url, Cause.TIMEOUT, "it did not answer in time")
    engine.refresh.set()
    return broken_leg(engine.role, engine.url, Cause.BROKEN, _say(error))


def _say(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refused(engine: Engine, response: aiohttp.ClientResponse, body: bytes) -> LegFailed:
    answer = Answer(response.status, body, response.headers.get("Content-Type", _JSON))
    return LegFailed(engine.role, engine.url, Cause.REFUSED, answer)


class _Error(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _Error


def failed_event(engine: Engine, first: bytes) -> LegFailed:
    """A stream that begins with an error event, as the answer it would have been without a stream."""
    body = first[len(b"data: ") :].split(b"\n\n", 1)[0]
    try:
        code = msgspec.json.decode(body, type=_ErrorEvent).error.code
    except msgspec.DecodeError:
        code = 500
    return LegFailed(engine.role, engine.url, Cause.REFUSED, Answer(code if 400 <= code < 600 else 500, body))


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            response.close()
            raise aiohttp.ClientPayloadError(f"the answer is longer than {_MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)
