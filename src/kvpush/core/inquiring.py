"""How much of a prompt is kept elsewhere: the receiver's half. An inquiry only asks; blocks come with a `Receive`.

It runs beside an `Expect` of the same key, which keeps the peer's lease alive until blocks are there.
"""

from dataclasses import dataclass

from kvpush.core.commands import Inquire
from kvpush.core.config import ProtocolConfig
from kvpush.core.digests import tokens_covered
from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import Found
from kvpush.core.ids import Key
from kvpush.core.messages import Ask
from kvpush.core.outbound import Outbound, Session, SessionState
from kvpush.core.outbox import Outbox
from kvpush.core.timers import Timers


@dataclass
class Inquiry:
    """One question that is open until `limit_at`, and is asked (again) at `retry_at`."""

    command: Inquire
    retry_at: float
    limit_at: float


class Inquirer:
    """All inquiries of this endpoint, by key. Each ends with one `Found`."""

    def __init__(self, config: ProtocolConfig, outbound: Outbound, outbox: Outbox) -> None:
        self._config = config
        self._outbound = outbound
        self._outbox = outbox
        self._open: dict[Key, Inquiry] = {}
        self._timers: Timers[Key] = Timers(self._deadline_of)

    def inquire(self, command: Inquire, now: float) -> None:
        """Ask as soon as the peer can be told."""
        if command.key in self._open:
            raise LocalProtocolError(f"{command.key} is being inquired about already", Reason.DUPLICATE_KEY)
        inquiry = Inquiry(command, now + self._config.retry_s, now + self._config.inquiry_s)
        self._open[command.key] = inquiry
        self._timers.arm(command.key, self._deadline(inquiry))
        self._ask(inquiry, now)

    def end(self, key: Key, tokens: int = 0) -> None:
        """There is an answer, or will be none: nothing for a key that is not open."""
        inquiry = self._open.pop(key, None)
        if inquiry is not None:
            command = inquiry.command
            found = min(tokens, tokens_covered(command.digests))
            self._outbox.event(Found(key, command.request_id, found))

    def answered(self, key: Key, session: Session, tokens: int) -> None:
        """The peer says how many tokens it has."""
        inquiry = self._open.get(key)
        if inquiry is None or inquiry.command.target != session.target:
            self._outbox.count("late_message", Reason.UNKNOWN_TRANSFER)
        else:
            self.end(key, tokens)

    def session_ready(self, session: Session, now: float) -> None:
        """A peer can be told."""
        for inquiry in self._with(session):
            self._ask(inquiry, now)

    def session_lost(self, session: Session) -> None:
        """A peer is gone, or refuses us."""
        for inquiry in self._with(session):
            self.end(inquiry.command.key)

    def stop(self) -> None:
        """No answer will be waited for."""
        for key in list(self._open):
            self.end(key)

    def _with(self, session: Session) -> list[Inquiry]:
        return [inquiry for inquiry in self._open.values() if inquiry.command.target == session.target]

    def _ask(self, inquiry: Inquiry, now: float) -> None:
        session = self._outbound.session(inquiry.command.target, now)
        if session.state is SessionState.READY:
            self._outbound.tell(session, Ask(inquiry.command.key, inquiry.command.digests))
        inquiry.retry_at = now + self._config.retry_s

    # time -----------------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Ask again; stop waiting."""
        for key in self._timers.due(now):
            inquiry = self._open[key]
            if now >= inquiry.limit_at:
                self._outbox.count("inquiry_unanswered", Reason.PEER_SILENT)
                self.end(key)
            else:
                self._ask(inquiry, now)
                self._timers.arm(key, self._deadline(inquiry))

    def next_deadline(self) -> float | None:
        """When there is next something to ask or to give up."""
        return self._timers.earliest()

    def _deadline_of(self, key: Key) -> float | None:
        inquiry = self._open.get(key)
        return self._deadline(inquiry) if inquiry is not None else None

    @staticmethod
    def _deadline(inquiry: Inquiry) -> float:
        return min(inquiry.retry_at, inquiry.limit_at)
