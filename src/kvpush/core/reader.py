"""Pull: the receiver reads. It posts nothing before the sender has offered, and believes nothing until it confirms."""

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.events import Outcome
from kvpush.core.ids import Key, OpId, PeerName
from kvpush.core.layout import Layout, check_blocks
from kvpush.core.messages import Offer
from kvpush.core.mode import Mode, in_words
from kvpush.core.outbound import Outbound, Session, SessionState
from kvpush.core.outbox import Outbox
from kvpush.core.reads import ReadOps
from kvpush.core.receipts import Receipts
from kvpush.core.receiving import Receiving
from kvpush.core.tables import Recv, RecvAction, RecvInput


class Reader(Receipts):
    """The part of a receiver that reads."""

    def __init__(self, config: ProtocolConfig, layout: Layout, outbound: Outbound, outbox: Outbox) -> None:
        super().__init__(config, layout, outbound, outbox)
        self._reads = ReadOps(layout, outbox)
        self._actions |= {
            RecvAction.READ: self._read,
            RecvAction.RELEASE: self._release,
            RecvAction.STOP: self._stop_reading,
            RecvAction.SEVER: self._sever,
        }

    def _ready(self, transfer: Receiving, session: Session, now: float) -> None:
        """The sender can be told. Who moves the bytes is settled when it first is."""
        if transfer.state is Recv.CONNECTING and not self._settle_mode(transfer, session, now):
            return
        self._step(transfer, RecvInput.ASK if transfer.mode is Mode.PULL else RecvInput.READY, now)

    def _settle_mode(self, transfer: Receiving, session: Session, now: float) -> bool:
        """Choose between push and pull; False when neither can begin now."""
        possible = [mode for mode in session.modes if transfer.wanted in (None, mode)]
        if not possible:
            detail = f"mode: this pair can {in_words(session.modes)}, the request asks for {transfer.wanted}"
            why = (Outcome.FAILED, Reason.INCOMPATIBLE, detail)
            self._step(transfer, RecvInput.GIVE_UP, now, why)
            return False
        transfer.mode = session.rates.choose(possible, transfer.span.tokens * self._layout.token_bytes)
        if transfer.mode is Mode.PULL:
            self._outbound.open_memory(session)
        return transfer.mode is Mode.PUSH or session.readable

    def peer_added(self, peer: PeerName, error: str, now: float) -> None:
        """The transport has loaded a sender that is to be read, or cannot."""
        session = self._outbound.loaded(peer, error)
        if session is None or session.state is not SessionState.READY:
            return
        for transfer in [t for t in self._with(session) if (t.state, t.mode) == (Recv.CONNECTING, Mode.PULL)]:
            if not error:
                self._step(transfer, RecvInput.ASK, now)
            elif transfer.wanted is None and Mode.PUSH in session.modes:
                transfer.mode = Mode.PUSH
                self._step(transfer, RecvInput.READY, now)
            else:
                detail = f"the sender's memory cannot be loaded: {error}"
                self._step(transfer, RecvInput.GIVE_UP, now, (Outcome.FAILED, Reason.PEER_HANDSHAKE, detail))

    def way_closed(self, peer: PeerName, now: float) -> None:
        """The transport has given up all that was in flight from a process."""
        session = self._outbound.closed(peer)
        for transfer in [t for t in self._with(session) if t.ops] if session is not None else ():
            self._step(transfer, RecvInput.PEER_LOST, now, (Outcome.FAILED, Reason.PEER_LOST, "the way was closed"))

    def offered(self, offer: Offer, session: Session, now: float) -> None:
        """The sender says where to read. Blocks that it cannot have end the transfer."""
        transfer = self._of(offer.key, session)
        if transfer is None:
            return
        if transfer.state not in (Recv.ASKED, Recv.PROMISED):
            self._step(transfer, RecvInput.OFFER, now)
            return
        if session.memory is None or not session.readable:  # it will be repeated
            return
        try:
            check_blocks(session.memory.layout, transfer.span, offer.blocks)
        except RemoteProtocolError as error:
            self._outbox.count("refused", error.reason)
            self._step(transfer, RecvInput.GIVE_UP, now, (Outcome.FAILED, error.reason, f"Offer.{error}"))
            return
        transfer.offered, transfer.token, transfer.at["offered"] = offer.blocks, offer.token, now
        self._step(transfer, RecvInput.OFFER, now)

    def _read(self, transfer: Receiving, now: float) -> None:
        session = self._outbound.get(transfer.target)
        assert session is not None
        assert session.memory is not None
        assert session.peer is not None
        self._reads.post(transfer, session.peer, session.memory.layout, transfer.offered, now)
        self._wait(transfer, None, transfer.at.get("accepted", now) + self._config.transfer_s)

    def may_post(self, op: OpId) -> bool:
        """Whether a read that has waited to be posted is still wanted."""
        key = self._reads.key_of(op)
        transfer = self._transfers.get(key) if key is not None else None
        return transfer is not None and transfer.state is Recv.READING

    def op_finished(self, op: OpId, error: str, now: float) -> None:
        """A read has stopped."""
        key = self._reads.stopped(op)
        transfer = self._transfers.get(key) if key is not None else None
        if transfer is None:
            self._outbox.count("late_completion", Reason.TRANSPORT)
            return
        transfer.ops.discard(op)
        if error:
            self._step(transfer, RecvInput.READ_FAILED, now, (Outcome.FAILED, Reason.TRANSPORT, error))
        if transfer.ops:
            return
        if transfer.state is Recv.READING:
            self._note_rate(transfer, now)
        self._step(transfer, RecvInput.READ if transfer.state is Recv.READING else RecvInput.STOPPED, now)

    def _note_rate(self, transfer: Receiving, now: float) -> None:
        transfer.at["read"] = now
        session = self._outbound.get(transfer.target)
        if session is not None:
            nbytes = transfer.span.tokens * self._layout.token_bytes
            self._outbound.measured(session, Mode.PULL, nbytes, now - transfer.at["posted"])

    def _release(self, transfer: Receiving, now: float) -> None:
        self._asking.release(transfer)
        limit = transfer.at["read"] + self._config.connect_timeout_s
        self._wait(transfer, now + self._config.retry_s, limit)

    def confirmed(self, key: Key, session: Session, now: float) -> None:
        """The sender says that what was read was right."""
        transfer = self._of(key, session)
        if transfer is not None and transfer.mode is Mode.PULL:
            self._step(transfer, RecvInput.COMPLETE, now, (Outcome.DELIVERED, Reason.OK, ""))

    def _stop_reading(self, transfer: Receiving, now: float) -> None:
        self._wait(transfer, None, now + self._config.drain_s)

    def _sever(self, transfer: Receiving, now: float) -> None:
        """The transport has let go of reads that had not stopped: what is under way may still land for a time."""
        self._keep_apart(transfer, now)
        self._wait(transfer, None, now + self._config.quarantine_s)

    @property
    def reads_in_flight(self) -> int:
        """Posted reads that have not stopped."""
        return len(self._reads)
