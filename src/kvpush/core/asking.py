"""What a receiver tells its senders, and how long a sender that is silent may still act on it."""

from kvpush.core.config import ProtocolConfig
from kvpush.core.messages import Cancel, Interest, Released
from kvpush.core.outbound import Outbound, SessionState
from kvpush.core.receiving import Receiving


class Asking:
    """Nothing is said to a sender that is not ready to hear it: it is said when it is."""

    def __init__(self, config: ProtocolConfig, outbound: Outbound) -> None:
        self._config = config
        self._outbound = outbound

    def watch(self, transfer: Receiving, now: float) -> None:
        """We want to know when the sender has begun."""
        session = self._outbound.session(transfer.target, now)
        if session.state is SessionState.READY:
            self._outbound.tell(session, Interest(transfer.key))

    def register(self, transfer: Receiving, now: float) -> None:
        """Where to write, or what we want to read."""
        session = self._outbound.session(transfer.target, now)
        transfer.sender = session.epoch
        transfer.at.setdefault("registered", now)
        self._outbound.tell(session, transfer.registration(session.clock))

    def release(self, transfer: Receiving) -> None:
        """All is read."""
        session = self._outbound.get(transfer.target)
        if session is not None and session.state is SessionState.READY:
            self._outbound.tell(session, Released(transfer.key))

    def cancel(self, transfer: Receiving) -> bool:
        """Give it up; False when there is nobody (any more) to be told that."""
        session = self._outbound.get(transfer.target)
        if session is not None and session.state is SessionState.READY:
            self._outbound.tell(session, Cancel(transfer.key, transfer.ending[1]))
        return session is not None

    def inquire(self, transfer: Receiving) -> None:
        """The address of a lost sender answers. If it is the process that was lost, its word ends the quarantine."""
        session = self._outbound.get(transfer.target)
        if session is not None and transfer.registered_with(session.epoch):
            self._outbound.tell(session, Cancel(transfer.key, transfer.ending[1]))

    def lease_ends(self, transfer: Receiving, now: float) -> float:
        """When the sender's lease has ended at the latest, for a transfer whose lease we renew no more. It runs from
        a time of the sender's clock that we have echoed, and so from before we last heard of the sender."""
        if transfer.lease_ends is None:
            session = self._outbound.get(transfer.target)
            heard = session.last_heard if session is not None else now
            transfer.lease_ends = heard + self._config.lease_s
        return transfer.lease_ends
