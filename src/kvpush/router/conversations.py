"""Which decode engine keeps the earlier turns of a conversation.

A conversation is known by how its text begins: for each of its first messages (or, of a plain prompt, its first pieces
of 64 bytes) there is a digest over all before it, and over what else must be equal: who asks, model, tools, template,
salt. So two clients never share anything, whatever they say. A turn is remembered under the digest of all that was
asked in it; the next one asks the same and more, and the longest beginning that is known wins. What of it is the same
to the token is judged by the engine that keeps it, so a wrong guess here costs a round trip and nothing else.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvpush.core.ids import Key
from kvpush.core.params import Reference
from kvpush.router.asked import SHAPES_PROMPT, Asked
from kvpush.router.body import Route
from kvpush.router.engine import Engine

PIECE_BYTES = 64
MOST_PIECES = 4096

Beginnings = tuple[bytes, ...]
"""The digests of a prompt's beginnings, the shortest first."""


class _Turn(NamedTuple):
    """Who keeps a turn under which key, if it has not been restarted since."""

    key: Key
    engine: Engine
    generation: int


class Conversations:
    """The turns that are believed to be kept; never more than `capacity`, the latest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def take(self, beginnings: Beginnings) -> Reference | None:
        """Where the longest known beginning is kept. It can be asked for once."""
        for beginning in reversed(beginnings):
            turn = self._turns.pop(beginning, None)
            if turn is None:
                continue
            identity = turn.engine.identity
            if identity is not None and turn.engine.generation == turn.generation:
                return Reference(turn.key, identity.target)
        return None

    def remember(self, beginnings: Beginnings, key: Key, engine: Engine) -> None:
        """`engine` has answered a request that begins so, and keeps it under `key`."""
        if not beginnings:
            return
        self._turns[beginnings[-1]] = _Turn(key, engine, engine.generation)
        self._turns.move_to_end(beginnings[-1])
        while len(self._turns) > self._capacity:
            self._turns.popitem(last=False)


def beginnings_of(asked: Asked, tenant: str) -> Beginnings:
    """The digests of what `tenant` asks; none for several prompts or choices, of which nobody knows how they go on."""
    if asked.sub_requests != 1:
        return ()
    shape = (tenant.encode(), asked.route.encode(), *(bytes(asked.fields.get(name, b"")) for name in SHAPES_PROMPT))
    chain = hashlib.blake2b(msgspec.msgpack.encode(shape), digest_size=16)
    found = []
    for piece in _pieces(asked):
        chain.update(len(piece).to_bytes(8, "little") + piece)
        found.append(chain.copy().digest())
    return tuple(found)


def _pieces(asked: Asked) -> Iterator[bytes]:
    if asked.route is Route.CHAT:
        yield from _messages(bytes(asked.fields.get("messages", b"")))[:MOST_PIECES]
        return
    text = bytes(asked.fields.get("prompt", b""))[:-1]  # the next turn's goes on where this one has its closing mark
    for start in range(0, min(len(text), MOST_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        yield text[start : start + PIECE_BYTES]


def _messages(text: bytes) -> list[bytes]:
    try:
        return [bytes(message) for message in msgspec.json.decode(text, type=list[msgspec.Raw])]
    except msgspec.DecodeError:
        return []
