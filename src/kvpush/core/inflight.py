"""The writes that a sender has posted and that have not stopped, by operation. Owned by its `Sender`."""

from kvpush.core.effects import Post
from kvpush.core.ids import Key, OpId
from kvpush.core.messages import encode_notice
from kvpush.core.outbox import Outbox
from kvpush.core.planner import Plan
from kvpush.core.sending import Sending


class InFlight:
    """Which transfer each operation belongs to; each is also in its transfer's `ops`."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._keys: dict[OpId, Key] = {}
        self._last = 0

    def post(self, transfer: Sending, copy: Plan, total: int, now: float) -> None:
        """Leave the effect that posts one part of a transfer. `total`: how many parts it has, which its last notice
        says; 0 while more may come."""
        assert transfer.caller is not None
        self._last += 1
        op = OpId(self._last)
        self._keys[op] = transfer.key
        transfer.add_part(op, copy, now)
        parts = total if transfer.parts == total else 0
        notice = encode_notice(transfer.caller.epoch, transfer.key, transfer.parts - 1, parts)
        self._outbox.effect(Post(op, transfer.caller.name, copy, notice))

    def key_of(self, op: OpId) -> Key | None:
        """Whose it is; None when it has stopped, or never was."""
        return self._keys.get(op)

    def stopped(self, op: OpId) -> Key | None:
        """An operation is over: whose it was."""
        return self._keys.pop(op, None)

    def __len__(self) -> int:
        return len(self._keys)
