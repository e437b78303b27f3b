import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from kvpush.cli.ask import AskError, ask

CHUNK = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def server(status: int, body: bytes, heard: list[bytes] | None = None) -> Iterator[str]:
    """A server that gives one answer to every POST."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            (heard if heard is not None else []).append(sent)
            self.send_response(status)
            self.send_header("X-KVPush-Path", "pd")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_pieces_of_the_answer_are_heard_and_joined() -> None:
    heard: list[bytes] = []
    pieces: list[str] = []
    with server(200, b": ping\n\n" + CHUNK % b"He" + CHUNK % b"llo" + USAGE + DONE, heard) as url:
        answer = ask(url, {"model": "m"}, pieces.append)
    assert (answer.text, pieces, answer.completion_tokens) == ("Hello", ["He", "llo"], 2)
    assert answer.headers["x-kvpush-path"] == "pd"
    assert answer.asked_at <= answer.first_at <= answer.ended_at
    assert msgspec.json.decode(heard[0]) == {"model": "m", "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (503, b"no engine", "status 503: no engine"),
        (200, CHUNK % b"He", "without its end mark"),
        (200, b"data: {broken\n\n", "broke off"),
    ],
)
def test_answer_that_is_none_is_an_error(status: int, body: bytes, why: str) -> None:
    with server(status, body) as url, pytest.raises(AskError, match=why):
        ask(url, {})


def test_server_that_is_not_there_is_an_error(unused_tcp_port_factory: Callable[[], int]) -> None:
    with pytest.raises(AskError, match="does not answer"):
        ask(f"http://127.0.0.1:{unused_tcp_port_factory()}", {})
