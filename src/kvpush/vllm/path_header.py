"""ASGI middleware for vLLM's API server: a decode engine's answers say when it has computed the prompt itself.

`--middleware kvpush.vllm.path_header.PathHeader` puts it around vLLM's API. vLLM sends the head of a stream before the
engine has begun; here it waits for the first piece of the body. By then it is known whether the prompt has come: a
transfer that fails is reported with the step in which the scheduler hears of it, the first token is sampled in a later
one, and the API server takes in the results of steps in their order.

The request's X-Request-Id is taken for its transfer id, which is what kvpush's router makes it. Requests without one,
and all that is not HTTP, pass untouched; bodies are never held.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvpush.vllm.recomputed import RECOMPUTED, Recomputed

# ASGI's own terms
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_SAYS = (b"x-kvpush-path", b"recomputed")
_ID = b"x-request-id"
_HEAD = "http.response.start"


class PathHeader:
    """ASGI middleware; vLLM makes it around its application."""

    def __init__(self, app: App, recomputed: Recomputed = RECOMPUTED) -> None:
        self._app = app
        self._recomputed = recomputed

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        name = _request_id(scope) if scope["type"] == "http" else ""
        if not name:
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, lambda: self._recomputed.take(name))
        await self._app(scope, receive, answer.send)
        await answer.begin()  # an application that raises has its server say so, while there is no head yet


def _request_id(scope: Message) -> str:
    for name, value in scope["headers"]:
        if name == _ID:
            return str(value, "latin-1")
    return ""


class _Answer:
    """One answer on its way out: its head waits for what comes next."""

    def __init__(self, send: Send, is_recomputed: Callable[[], bool]) -> None:
        self._send = send
        self._is_recomputed = is_recomputed
        self._head: Message | None = None

    async def send(self, message: Message) -> None:
        """What the application has to say."""
        if self._head is not None:
            await self.begin()
        if message["type"] == _HEAD:
            self._head = message
        else:
            await self._send(message)

    async def begin(self) -> None:
        """Let the head go, if it waits."""
        head, self._head = self._head, None
        if head is not None:
            await self._send(_marked(head) if self._is_recomputed() else head)


def _marked(head: Message) -> Message:
    return {**head, "headers": [*head.get("headers", ()), _SAYS]}
