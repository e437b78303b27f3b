"""Connections and their pool, against a server that sends exactly the bytes it is told to."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from router.rig import until_true

from kvpush.router.connection import BadAnswer, Connection
from kvpush.router.pool import ConnectFailed, Pool

HELLO = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nx-trailer: content-type\r\n\r\n"
)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
FOREVER_S = 30.0


class Far:
    """The other end: answers each request with the next of `answers`, cut into pieces; b"" closes."""

    def __init__(self, *answers: bytes, piece: int = 1 << 20) -> None:
        self.opened = 0
        self.live = 0
        self.sent = 0
        self._answers = list(answers)
        self._piece = piece

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.live += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await self._answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.live -= 1
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        answer = self._answers.pop(0)
        for start in range(0, len(answer), self._piece):
            writer.write(answer[start : start + self._piece])
            await writer.drain()
            self.sent += self._piece
            await asyncio.sleep(0)  # a turn of the loop, so that pieces travel alone
        if not answer or answer.endswith(b"THE END"):
            raise ConnectionError


@asynccontextmanager
async def served(far: Far, keepalive_s: float = FOREVER_S) -> AsyncIterator[Pool]:
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool(f"http://127.0.0.1:{port}/base", connect_timeout_s=5.0, keepalive_s=keepalive_s)
    try:
        yield pool
        pool.close()
        await until_true(lambda: is_true(far.live == 0))
    finally:
        pool.close()
        server.close()
        await server.wait_closed()


async def is_true(value: bool) -> bool:
    return value


async def asked(pool: Pool, method: str = "GET", silence_s: float = FOREVER_S) -> Connection:
    connection = await pool.take()
    connection.ask(method, GET, silence_s)
    return connection


async def body_of(connection: Connection) -> bytes:
    parts = []
    while part := await connection.read():
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize("answer", [HELLO, CHUNKED], ids=["length", "chunked"])
async def test_answer_is_read_whole_however_it_is_cut(answer: bytes, piece: int) -> None:
    far = Far(answer, answer, piece=piece)
    async with served(far) as pool:
        for _ in range(2):
            connection = await asked(pool)
            assert await body_of(connection) == b"hello"
            assert connection.answer.status == 200
            assert connection.answer.content_type.startswith("text/")
            connection.release()
    assert far.opened == 1


async def test_answer_without_a_length_ends_with_its_connection() -> None:
    async with served(Far(b"HTTP/1.1 200 OK\r\n\r\nas long as it takes THE END", HELLO)) as pool:
        connection = await asked(pool)
        assert await body_of(connection) == b"as long as it takes THE END"
        connection.release()
        assert await body_of(await asked(pool)) == b"hello"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nTHE END", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-much: more\r\n" * 10_000, "longer than"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "no HTTP"),
        (b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", "no HTTP"),
    ],
    ids=["nothing", "half", "ssh", "endless_head", "two_lengths", "upgrade"],
)
async def test_reader_is_told_what_is_wrong_with_an_answer(answer: bytes, problem: str) -> None:
    async with served(Far(answer)) as pool:
        connection = await asked(pool)
        with pytest.raises(BadAnswer, match=problem):
            await body_of(connection)
        connection.release()


async def test_interim_answers_are_passed_over() -> None:
    async with served(Far(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + HELLO)) as pool:
        connection = await asked(pool)
        assert await body_of(connection) == b"hello"
        assert connection.answer.status == 200


@pytest.mark.parametrize(
    ("method", "answer", "body"),
    [
        ("HEAD", HELLO[:-5], b""),
        ("GET", HELLO.replace(b"Content-Type", b"Connection: close\r\nContent-Type"), b"hello"),
        ("GET", HELLO + HELLO, b"hello"),
    ],
    ids=["head", "close", "two_for_one"],
)
async def test_connection_is_not_used_again_when_its_answer_leaves_doubts(
    method: str, answer: bytes, body: bytes
) -> None:
    far = Far(answer, HELLO)
    async with served(far) as pool:
        connection = await asked(pool, method)
        assert await body_of(connection) == body
        connection.release()
        connection.release()
        assert await body_of(await asked(pool)) == b"hello"
    assert far.opened == 2


async def test_engine_sees_its_client_leave_when_an_unfinished_answer_is_released() -> None:
    far = Far(CHUNKED[:-10])
    async with served(far) as pool:
        connection = await asked(pool)
        assert await connection.read()
        connection.release()
        await until_true(lambda: is_true(far.live == 0))


async def test_silence_is_an_error_only_while_somebody_reads() -> None:
    async with served(Far(HELLO[:-1])) as pool:
        connection = await asked(pool, silence_s=0.02)
        assert await connection.read() == b"hell"
        await passed(0.1)
        assert connection.answer.status == 200
        with pytest.raises(TimeoutError):
            await connection.read()
        connection.release()


async def test_engine_is_held_back_while_nobody_reads() -> None:
    size = 16 * 1024 * 1024
    far = Far(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size), piece=1 << 16)
    async with served(far) as pool:
        connection = await asked(pool)
        first = await connection.read()
        await until_true(lambda: stands_still(lambda: far.sent))
        assert far.sent < size / 2
        assert connection.answer.buffered_bytes < 1 << 20
        assert len(first) + len(await body_of(connection)) == size


async def passed(seconds: float) -> None:
    """Timers that were due before then have run."""
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, done.set_result, None)
    await done


async def stands_still(value: Callable[[], int]) -> bool:
    before = value()
    await passed(0.1)
    return value() == before


async def test_idle_connections_are_closed_before_an_engine_would() -> None:
    far = Far(HELLO, HELLO)
    async with served(far, keepalive_s=0.02) as pool:
        for _ in range(2):
            connection = await asked(pool)
            assert await body_of(connection) == b"hello"
            connection.release()
            await until_true(lambda: is_true(far.live == 0))
    assert far.opened == 2


async def test_closed_pool_ends_answers_in_progress() -> None:
    async with served(Far(HELLO[:-1])) as pool:
        connection = await asked(pool)
        assert await connection.read() == b"hell"
        pool.close()
        with pytest.raises(BadAnswer):
            await connection.read()


async def test_pool_says_whom_it_cannot_reach() -> None:
    async with served(Far()) as gone:
        host = gone.host
    with pytest.raises(ConnectFailed, match=f"no connection to {host}: "):
        await Pool(f"http://{host}", 5.0, FOREVER_S).take()
