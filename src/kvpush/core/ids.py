"""Names for the things the protocol talks about.

Every identifier is its own type, so that mypy refuses a request id where a transfer id is meant.
Nothing in kvpush is ever matched on a request id: the key of a transfer is (`transfer_id`, `attempt`).
"""

from typing import NewType

import msgspec

TransferId = NewType("TransferId", str)
"""128 random bits as 32 lower-case hex digits, minted by the router once per dispatch."""

RequestId = NewType("RequestId", str)
"""vLLM's id of a request inside one engine. Only ever handed back to the engine that gave it."""

EngineId = NewType("EngineId", str)
"""vLLM's id of one engine process (`kv_transfer_config.engine_id`)."""

Epoch = NewType("Epoch", int)
"""63 random bits drawn when a transfer thread starts: a restarted process is another peer."""

LinkId = NewType("LinkId", int)
"""One control connection. Positive: opened by our endpoint. Negative: accepted by our runtime."""

OpId = NewType("OpId", int)
"""One posted transport operation of one endpoint. Positive: a WRITE. Negative: a READ."""

PeerName = NewType("PeerName", str)
"""The name under which a transport knows a peer's agent: `engine_id/rank@epoch`."""


class Key(msgspec.Struct, frozen=True, order=True, array_like=True):
    """What every message about a transfer carries."""

    transfer_id: TransferId
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.transfer_id}.{self.attempt}"


class Address(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Where a transfer thread listens for control connections."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Target(msgspec.Struct, frozen=True, array_like=True):
    """The sender that a receiver is told to ask: an address, and who is expected there.

    `engine_id` None accepts whichever engine answers; a router that knows the id should send it, so
    that a restarted engine is noticed at the first message.
    """

    address: Address
    engine_id: EngineId | None = None
