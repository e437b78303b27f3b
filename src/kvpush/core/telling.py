"""What a sender tells its receivers."""

from kvpush.core.inbound import Caller
from kvpush.core.layout import Layout
from kvpush.core.messages import (
    Accepted,
    Confirmed,
    Drained,
    Draining,
    Dropped,
    Failed,
    Message,
    Offer,
    Writing,
    Written,
)
from kvpush.core.offers import offered_blocks
from kvpush.core.outbox import Outbox
from kvpush.core.sending import Sending, told
from kvpush.core.tables import Send


class Telling:
    """Nothing is said of a transfer that nobody has registered."""

    def __init__(self, layout: Layout, outbox: Outbox) -> None:
        self._layout = layout
        self._outbox = outbox

    def accept(self, transfer: Sending, now: float) -> None:
        """The registration is valid."""
        self._say(transfer, Accepted(transfer.key))

    def drop(self, transfer: Sending, now: float) -> None:
        """Nothing is in flight, and nothing ever will be."""
        self._say(transfer, Dropped(transfer.key))

    def drain(self, transfer: Sending, now: float) -> None:
        """Closed, but writes are in flight."""
        self._say(transfer, Draining(transfer.key))

    def hint(self, transfer: Sending, now: float) -> None:
        """All is written."""
        self._say(transfer, Written(transfer.key, transfer.nbytes, transfer.wire_s))

    def offer(self, transfer: Sending) -> None:
        """Where to read."""
        self._say(transfer, Offer(transfer.key, offered_blocks(transfer, self._layout)))

    def confirm(self, transfer: Sending) -> None:
        """What was read was right."""
        self._say(transfer, Confirmed(transfer.key))

    def end(self, transfer: Sending, now: float) -> None:
        """Drained after a cancel, else Failed."""
        outcome, reason, detail = transfer.ending
        if transfer.cancelled:
            self._say(transfer, Drained(transfer.key))
        else:
            self._say(transfer, Failed(transfer.key, told(outcome, reason), detail[:1000]))

    def remind(self, transfer: Sending) -> None:
        """A lost hint would hold up the write, a lost offer the read."""
        if transfer.ops:
            self._say(transfer, Writing(transfer.key))
        elif transfer.state is Send.OFFERED:
            self.offer(transfer)

    def _say(self, transfer: Sending, message: Message) -> None:
        if transfer.caller is not None:
            self.tell(transfer.caller, message)

    def tell(self, caller: Caller, message: Message) -> None:
        """Say something to a receiver."""
        self._outbox.send(caller.link, caller.epoch, message)
