"""The transfer thread: owns the transport, the control channel and the endpoint; everyone else uses its mailbox."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpush.core.commands import Command
from kvpush.core.config import ProtocolConfig
from kvpush.core.events import Event
from kvpush.core.ids import Address, EngineId
from kvpush.core.layout import Layout
from kvpush.transport.base import Transport


@dataclass(frozen=True, kw_only=True)
class ThreadConfig:
    """`listen` port 0 picks a free one. `secret` "" means an open control channel (a warning is logged)."""

    engine_id: EngineId
    listen: Address
    protocol: ProtocolConfig = ProtocolConfig()
    secret: str = ""
    poll_us: int = 100


class TransferThread:
    """Start it, submit commands, drain events. All methods may be called from any thread and never wait,
    but for `start` (until ready or failed) and `stop` (bounded by `protocol.stop_s`)."""

    def __init__(self, config: ThreadConfig, layout: Layout, make_transport: Callable[[], Transport]) -> None:
        """`make_transport` is called on the thread, so that it owns what it makes."""
        raise NotImplementedError

    def start(self) -> Address:
        """Run the thread; returns the address it listens on. Raises `ControlError` or `TransportError`."""
        raise NotImplementedError

    def submit(self, commands: Iterable[Command]) -> None:
        """Put commands into the mailbox and wake the thread: microseconds, no system call but one."""
        raise NotImplementedError

    def drain(self) -> list[Event]:
        """Events since the last call, in order."""
        raise NotImplementedError

    def stop(self) -> list[Event]:
        """End every transfer explicitly, close everything, join; returns the last events. Idempotent."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """False once the thread has ended, whatever the reason."""
        raise NotImplementedError
