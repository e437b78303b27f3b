"""One worker rank's side of the protocol, sending and receiving: sans-IO.

Feed it commands, frames, completions and time; drain effects and events after each input.
"""

from collections.abc import Sequence

from kvpush.core.commands import Command
from kvpush.core.config import ProtocolConfig
from kvpush.core.effects import Effect
from kvpush.core.events import Event
from kvpush.core.ids import Address, EngineId, Epoch, LinkId, OpId, PeerName
from kvpush.core.layout import Layout


class Endpoint:
    """`now` is the driver's monotonic clock in seconds; it never goes back."""

    def __init__(
        self, config: ProtocolConfig, engine_id: EngineId, epoch: Epoch, layout: Layout, metadata: bytes
    ) -> None:
        """`metadata` is our transport's, sent to peers in the hello."""
        raise NotImplementedError

    # inputs -------------------------------------------------------------------------------------------
    def execute(self, command: Command, now: float) -> None:
        """Take one command of our engine. Raises `LocalProtocolError` when it breaks the rules."""
        raise NotImplementedError

    def frame_received(self, link: LinkId, frame: bytes, now: float) -> None:
        """Take one control message. Never raises: what is wrong with it is counted and answered."""
        raise NotImplementedError

    def link_lost(self, link: LinkId, now: float) -> None:
        """A control connection is gone (the driver may also know nothing of it; silence is noticed too)."""
        raise NotImplementedError

    def peer_added(self, peer: PeerName, error: str, now: float) -> None:
        """The transport has loaded a peer, or says why not ("" is success)."""
        raise NotImplementedError

    def op_finished(self, op: OpId, error: str, now: float) -> None:
        """A posted operation has stopped, or could not be posted; "" is success."""
        raise NotImplementedError

    def notice_received(self, notice: bytes, now: float) -> None:
        """A notice arrived on the data plane. Never raises."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Let time pass: everything due by `now` happens."""
        raise NotImplementedError

    # outputs ------------------------------------------------------------------------------------------
    def next_deadline(self) -> float | None:
        """When `tick` next has something to do; None when nothing is pending."""
        raise NotImplementedError

    def take_effects(self) -> Sequence[Effect]:
        """Effects since the last call, to be carried out in order."""
        raise NotImplementedError

    def take_events(self) -> Sequence[Event]:
        """Events since the last call."""
        raise NotImplementedError

    @property
    def ops_in_flight(self) -> int:
        """Posted operations that have not finished: the transport must be polled."""
        raise NotImplementedError

    @property
    def notices_due(self) -> int:
        """Receives whose sender says it has written, or is writing: poll the transport for their notices."""
        raise NotImplementedError
