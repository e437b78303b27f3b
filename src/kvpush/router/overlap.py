"""What the decode engine says again of what the client has been sent early: taken out, and compared on the way.

The client's text is the decode engine's, whoever has sent its beginning: what has been sent must be where that
engine's text begins, or nothing more is passed on.
"""

from kvpush.core.errors import KVPushError
from kvpush.router.events import Events, read_chunk


class Contradiction(KVPushError):
    """The decode engine does not begin with what the client has been sent; `event` is what it says instead."""

    def __init__(self, sent: str, event: bytes) -> None:
        super().__init__(f"it began with {event[:200].decode(errors='replace')!r} when {sent!r} had been sent already")
        self.event = event


class Overlap:
    """`ahead` is what the client has been sent, and the decode engine has not said yet."""

    def __init__(self, sent: str) -> None:
        self.ahead = sent
        self.is_over = False
        self._events = Events()

    def feed(self, data: bytes) -> bytes:
        """More of the decode engine's stream. Returns what goes on to the client; raises `Contradiction`."""
        self._events.feed(data)
        out = b""
        while not self.is_over and (event := self._events.take()) is not None:
            out += self._beyond(event)
        return out + self._events.rest if self.is_over else out

    def _beyond(self, event: bytes) -> bytes:
        chunk = read_chunk(event)
        if chunk is None or chunk.extras:
            raise Contradiction(self.ahead, event)
        if chunk.text.startswith(self.ahead):
            self.is_over = True
            more = chunk.text[len(self.ahead) :]
            return chunk.with_text(more) if more or chunk.finish_reason else b""
        if not self.ahead.startswith(chunk.text) or chunk.finish_reason:
            raise Contradiction(self.ahead, event)
        self.ahead = self.ahead[len(chunk.text) :]
        return b""
