"""Pull: the sender lets itself be read. It says where once the prompt is complete, and confirms only what it held."""

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.events import Outcome
from kvpush.core.ids import Key
from kvpush.core.inbound import Caller
from kvpush.core.layout import Layout
from kvpush.core.messages import Confirmed, Offer
from kvpush.core.offers import can_offer, offered_blocks
from kvpush.core.outbox import Outbox
from kvpush.core.sender import Sender
from kvpush.core.sending import Sending, verdict
from kvpush.core.tables import Send, SendAction, SendInput


class Lender(Sender):
    """A sender whose receivers may read."""

    def __init__(self, config: ProtocolConfig, layout: Layout, outbox: Outbox) -> None:
        super().__init__(config, layout, outbox)
        self._offers = 0
        self._actions |= {SendAction.OFFER: self._offer, SendAction.CONFIRM: self._confirm}

    def released(self, caller: Caller, key: Key, now: float) -> None:
        """The receiver has read it all. Whether that was right is known here: the blocks are this transfer's own as
        long as it is `OFFERED`, whatever the clocks of the two say."""
        stone = self._retired.get(key)
        if stone is not None:
            self._tell(caller, verdict(key, stone))
            return
        transfer = self._transfers.get(key)
        if transfer is None or transfer.caller is not caller:
            raise RemoteProtocolError(Reason.UNKNOWN_TRANSFER, f"{key} was not offered to {caller.name}", "key")
        self._step(transfer, SendInput.RELEASE, now, (Outcome.DELIVERED, Reason.OK, ""))

    @property
    def offers(self) -> int:
        """Transfers that are being read, as far as we know: some transports need our polls for it."""
        return self._offers

    def _offer(self, transfer: Sending, now: float) -> None:
        """Say where to read, if all of it is there. A lease that has ended already expires with the next tick."""
        try:
            if not can_offer(transfer) or transfer.lease_until is None or now >= transfer.lease_until:
                return
        except ValueError as error:
            transfer.end_with(Outcome.FAILED, Reason.SPAN_NOT_COVERED, str(error))
            self._step(transfer, SendInput.WITHDRAW, now)
            return
        self._say_offer(transfer)
        if transfer.state is Send.PROMISED:
            transfer.at["offered"] = now
            self._offers += 1
            self._step(transfer, SendInput.OFFER, now)

    def _say_offer(self, transfer: Sending) -> None:
        token = transfer.token if transfer.wants_token else None
        self._say(transfer, Offer(transfer.key, offered_blocks(transfer, self._layout), token))

    def _remind(self, transfer: Sending) -> None:
        super()._remind(transfer)
        if transfer.state is Send.OFFERED:  # a lost offer would hold up the read
            self._say_offer(transfer)

    def _confirm(self, transfer: Sending, now: float) -> None:
        transfer.at["released"] = now
        transfer.nbytes = transfer.span.tokens * self._layout.token_bytes
        self._say(transfer, Confirmed(transfer.key))

    def _retire(self, transfer: Sending, now: float) -> None:
        self._offers -= "offered" in transfer.at
        super()._retire(transfer, now)
