"""A decode engine's answer says that it has computed the prompt itself, and is otherwise what vLLM has made of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
import uvicorn
from router.stub import until
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from kvpush.vllm.path_header import Message, PathHeader, Receive, Send
from kvpush.vllm.recomputed import MOST_IDS, Recomputed

TRANSFER = "0123456789abcdef0123456789abcdef"
NAMED = {"type": "http", "headers": [(b"host", b"d"), (b"x-request-id", TRANSFER.encode())]}
HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
BODY = {"type": "http.response.body", "body": b"a", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}
MARK = (b"x-kvpush-path", b"recomputed")
App = Callable[[Message, Receive, Send], Awaitable[None]]


async def nothing() -> Message:
    raise AssertionError("nobody asked for it")


async def told(app: App, recomputed: Recomputed, scope: Message) -> list[Message]:
    """What a server is told in the end."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await PathHeader(app, recomputed)(scope, nothing, send)
    return sent


def saying(*messages: Message) -> App:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


async def test_head_says_what_is_known_when_the_body_begins() -> None:
    recomputed = Recomputed()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send(HEAD)
        recomputed.note([TRANSFER])  # a step's results come in while the head waits
        await send(BODY)
        await send(END)

    head, *rest = await told(app, recomputed, NAMED)

    assert head == {**HEAD, "headers": [*HEAD["headers"], MARK]}  # type: ignore[misc]
    assert rest == [BODY, END]
    assert HEAD["headers"] == [(b"content-type", b"text/event-stream")], "the application's own head is left alone"


async def test_answer_about_which_nothing_is_known_is_passed_on_as_it_is() -> None:
    recomputed = Recomputed()
    recomputed.note(["another"])

    sent = await told(saying(HEAD, BODY, END), recomputed, NAMED)

    assert [id(message) for message in sent] == [id(HEAD), id(BODY), id(END)]
    assert len(recomputed) == 1


async def test_piece_of_a_body_is_passed_on_before_the_application_goes_on() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send(HEAD)
        assert sent == []
        await send(BODY)
        assert sent == [HEAD, BODY]
        await send(END)
        assert sent == [HEAD, BODY, END]

    await PathHeader(app, Recomputed())(NAMED, nothing, send)


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "headers": NAMED["headers"]},
        {"type": "http", "headers": [(b"host", b"d"), (b"x-kvpush-path", b"recomputed")]},
    ],
    ids=["lifespan", "websocket", "http without an id"],
)
async def test_what_is_no_leg_of_a_router_passes_untouched(scope: Message) -> None:
    seen: list[tuple[object, ...]] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    async def send(message: Message) -> None:
        raise AssertionError("nothing was said")

    await PathHeader(app, Recomputed())(scope, nothing, send)

    assert seen == [(scope, nothing, send)]


async def test_answer_that_ends_without_a_body_has_its_head() -> None:
    assert await told(saying(HEAD), Recomputed(), NAMED) == [HEAD]


async def test_application_that_fails_before_the_body_has_sent_nothing_yet() -> None:
    """So the server around it can still answer 500, where it could only break off before."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send(HEAD)
        raise ValueError("no body")

    with pytest.raises(ValueError, match="no body"):
        await PathHeader(app, Recomputed())(NAMED, nothing, send)
    assert sent == []


def test_transfer_is_told_of_once() -> None:
    recomputed = Recomputed()
    recomputed.note([TRANSFER, TRANSFER, "other"])
    assert [recomputed.take(name) for name in (TRANSFER, TRANSFER, "other", "unknown")] == [True, False, True, False]


def test_only_the_newest_transfers_are_remembered() -> None:
    recomputed = Recomputed()
    recomputed.note(map(str, range(MOST_IDS)))
    recomputed.note(["0", "new"])
    assert len(recomputed) == MOST_IDS
    assert [recomputed.take(name) for name in ("0", "1", "2", "new")] == [True, False, True, True]


# in a real server ---------------------------------------------------------------------------------------------


class Engine:
    """An API like vLLM's, without an engine: `go` lets the next piece of a stream come."""

    def __init__(self) -> None:
        self.recomputed = Recomputed()
        self.go = asyncio.Semaphore(0)
        self.streaming = 0
        self.left = 0

    async def _pieces(self) -> AsyncIterator[str]:
        self.streaming += 1
        try:
            for number in range(3):
                await self.go.acquire()
                yield f"data: {number}\n\n"
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def stream(self, request: Request) -> Response:
        return StreamingResponse(self._pieces(), media_type="text/event-stream")

    async def plain(self, request: Request) -> Response:
        return JSONResponse({"said": len(await request.body())})

    async def refuse(self, request: Request) -> Response:
        return JSONResponse({"error": "no"}, status_code=422)

    async def fail(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[str]:
            raise RuntimeError("dead")
            yield ""

        return StreamingResponse(pieces())

    async def echo(self, socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    def app(self) -> Starlette:
        posted = {"/stream": self.stream, "/plain": self.plain, "/refuse": self.refuse, "/fail": self.fail}
        routes = [Route(path, serve, methods=["POST"]) for path, serve in posted.items()]
        wrapped = [Middleware(PathHeader, recomputed=self.recomputed)]
        return Starlette(routes=[*routes, WebSocketRoute("/echo", self.echo)], middleware=wrapped)


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the engine behind a real server."""
    config = uvicorn.Config(
        engine.app(), port=0, log_level="critical", timeout_graceful_shutdown=1, ws="websockets-sansio"
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"X-Request-Id": TRANSFER}) as session:
            yield session
    finally:
        server.should_exit = True
        await running


async def test_stream_behind_a_real_server_says_so_and_comes_piece_by_piece() -> None:
    engine = Engine()
    async with served(engine) as session:
        asking = asyncio.create_task(session.post("/stream"))
        await until(lambda: engine.streaming == 1)
        engine.recomputed.note([TRANSFER])
        engine.go.release()
        async with await asking as answer:
            assert answer.headers["x-kvpush-path"] == "recomputed"
            assert await answer.content.readuntil(b"\n\n") == b"data: 0\n\n"
            engine.go.release()
            assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
            engine.go.release()
            assert await answer.read() == b"data: 2\n\n"


async def test_whole_answers_say_so_and_others_do_not() -> None:
    engine = Engine()
    engine.recomputed.note([TRANSFER])
    async with served(engine) as session:
        headers = []
        for _ in range(2):
            async with session.post("/plain", data=b"four") as answer:
                assert await answer.json() == {"said": 4}
                headers.append(answer.headers.get("x-kvpush-path"))
    assert headers == ["recomputed", None]


@pytest.mark.parametrize(("path", "status"), [("/refuse", 422), ("/none", 404), ("/fail", 500)])
async def test_errors_come_through_whole(path: str, status: int) -> None:
    async with served(Engine()) as session, session.post(path) as answer:
        await answer.read()
        assert answer.status == status


@pytest.mark.parametrize("pieces", [0, 1])
async def test_client_that_leaves_is_noticed(pieces: int) -> None:
    engine = Engine()
    async with served(engine) as session:
        asking = asyncio.create_task(session.post("/stream"))
        await until(lambda: engine.streaming == 1)
        if pieces:
            engine.go.release()
            answer = await asking
            await answer.content.readuntil(b"\n\n")
            answer.close()
        else:
            asking.cancel()
        await until(lambda: engine.left == 1)


async def test_web_socket_passes() -> None:
    async with served(Engine()) as session, session.ws_connect("/echo") as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"
