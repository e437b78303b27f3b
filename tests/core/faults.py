"""Judges of frames that tests share."""

from core.network import LOST, Fate, Judge
from core.process import Process

from kvpush.core.messages import Message


def lose(*kinds: type[Message]) -> Judge:
    """Lose all frames of some kinds."""
    return lambda _source, _destination, message: LOST if isinstance(message, kinds) else None


def first(kind: type[Message], fate: Fate = LOST) -> Judge:
    """Let something happen to the first frame of a kind only."""
    met: list[Message] = []

    def judge(_source: Process, _destination: Process, message: Message) -> Fate | None:
        if not isinstance(message, kind) or met:
            return None
        met.append(message)
        return fate

    return judge


def listen(messages: list[Message], *kinds: type[Message]) -> Judge:
    """Note the messages of some kinds that are sent; nothing happens to them."""

    def judge(_source: Process, _destination: Process, message: Message) -> Fate | None:
        if isinstance(message, kinds):
            messages.append(message)
        return None

    return judge
