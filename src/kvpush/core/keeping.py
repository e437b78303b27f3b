"""Finished prompts that are kept in case that their conversation goes on elsewhere: the sender's half.

What is kept here is a transfer that nobody has asked for yet. A peer first asks how much of a prompt of its own is kept
under a key (`Ask`), which is answered by comparing tokens. With its registration, or a cancel, the transfer is the
`Sender`'s like any other. An engine may take the blocks back at any time before (`Release`); when nobody asks for
`keep_s`, it gets them back by itself.

A question may be faster than what it asks for, since a client has the last token of an answer before the engine that
gave it takes its next step. So an engine promises early what it will keep, and questions wait for that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpush.core.commands import Final, Keep, Promise, Release, Withdraw
from kvpush.core.config import ProtocolConfig
from kvpush.core.digests import DIGEST_BYTES, tokens_in_common
from kvpush.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from kvpush.core.ids import Epoch, Key
from kvpush.core.inbound import Caller, Inbound
from kvpush.core.messages import Ask, Holds, Register
from kvpush.core.sender import Sender
from kvpush.core.timers import Timers


@dataclass
class Kept:
    """One finished prompt. `promised`: how many of its tokens each process that has asked has in common with it."""

    command: Keep
    until: float
    promised: dict[Epoch, int] = field(default_factory=dict)


class Keeper:
    """Everything that is kept by this endpoint, by key."""

    def __init__(self, config: ProtocolConfig, sender: Sender, inbound: Inbound) -> None:
        self._config = config
        self._sender = sender
        self._inbound = inbound
        self._kept: dict[Key, Kept] = {}
        self._promised: dict[Key, dict[Epoch, tuple[Caller, Ask]]] = {}
        self._timers: Timers[Key] = Timers(self._deadline_of)

    # our engine -----------------------------------------------------------------------------------------
    def promise(self, command: Promise) -> None:
        """A prompt will be there to be asked for."""
        self._promised.setdefault(command.key, {})

    def keep(self, command: Keep, now: float) -> None:
        """A prompt is there to be asked for, until `keep_s` from now."""
        if command.key in self._kept:
            raise LocalProtocolError(f"{command.key} is kept already", Reason.DUPLICATE_KEY)
        self._kept[command.key] = Kept(command, now + command.keep_s)
        self._timers.arm(command.key, now + command.keep_s)
        self._answer_early(command.key, now)

    def _answer_early(self, key: Key, now: float) -> None:
        for caller, question in self._promised.pop(key, {}).values():
            self.ask(caller, question, now)

    def release(self, command: Release, now: float) -> None:
        """The engine needs the blocks. Where a peer has been faster, this is as good as a withdrawal."""
        self._answer_early(command.key, now)
        kept = self._kept.get(command.key)
        if kept is not None:
            self._end(kept, Reason.EVICTED, now)

    def stop(self, now: float) -> None:
        """Nothing is kept any longer."""
        self._promised.clear()
        for kept in list(self._kept.values()):
            self._end(kept, Reason.SHUTDOWN, now)

    def _end(self, kept: Kept, reason: Reason, now: float, detail: str = "") -> None:
        """The sender is told of the end only, not of any blocks: whoever may have registered before there was anything
        to compare gets nothing written."""
        command = kept.command
        del self._kept[command.key]
        self._sender.withdraw(Withdraw(command.key, command.request_id, reason, detail), now)

    # the peers ------------------------------------------------------------------------------------------
    def ask(self, caller: Caller, message: Ask, now: float) -> None:
        """Say how much of the caller's prompt is kept under a key: nothing, when the key is unknown."""
        if len(message.digests) % DIGEST_BYTES:
            raise RemoteProtocolError(Reason.BAD_MESSAGE, f"{len(message.digests)} bytes are no digests", "digests")
        if message.key in self._promised:
            self._promised[message.key][caller.epoch] = (caller, message)
            return
        kept, tokens = self._kept.get(message.key), 0
        if kept is not None:
            tokens = tokens_in_common(kept.command.digests, message.digests)
            kept.promised[caller.epoch] = tokens
            self._renew(kept, now)
        self._inbound.tell(caller, Holds(message.key, tokens))

    def renew(self, keys: Iterable[Key], now: float) -> None:
        """A heartbeat names these."""
        for key in keys:
            if (kept := self._kept.get(key)) is not None:
                self._renew(kept, now)

    def _renew(self, kept: Kept, now: float) -> None:
        kept.until = max(kept.until, now + self._config.lease_s)

    def registered(self, caller: Caller, message: Register, now: float) -> None:
        """A registration has come. If it is for tokens that nobody has compared, the transfer ends here and now."""
        kept = self._kept.get(message.key)
        if kept is None:
            return
        promised = kept.promised.get(caller.epoch, 0)
        if message.span.end > promised:
            detail = f"tokens up to {message.span.end} were asked for, {promised} are known to be the same"
            self._end(kept, Reason.SPAN_NOT_COVERED, now, detail)
        else:
            self.surrender(message.key, now)

    def surrender(self, key: Key, now: float) -> None:
        """From here on a prompt is the sender's; nothing for one that is not kept."""
        self._promised.get(key, {}).clear()
        kept = self._kept.pop(key, None)
        if kept is not None:
            command = kept.command
            self._sender.final(Final(key, command.request_id, command.tokens, command.blocks), now)

    # time -----------------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Let go of what nobody has asked for."""
        for key in self._timers.due(now):
            self._end(self._kept[key], Reason.NOT_ASKED_FOR, now)

    def next_deadline(self) -> float | None:
        """When the first of them is let go."""
        return self._timers.earliest()

    def _deadline_of(self, key: Key) -> float | None:
        kept = self._kept.get(key)
        return kept.until if kept is not None else None

    def __len__(self) -> int:
        return len(self._kept)
