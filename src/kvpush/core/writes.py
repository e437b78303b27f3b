"""The writes of a sender that have been posted and have not stopped."""

from kvpush.core.chunks import Writes
from kvpush.core.effects import Post
from kvpush.core.ids import Key, OpId
from kvpush.core.messages import Writing, encode_notice
from kvpush.core.outbox import Outbox
from kvpush.core.planner import Plan
from kvpush.core.sending import Sending


class WriteOps:
    """Which transfer each operation belongs to."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._last_op = 0
        self._keys: dict[OpId, Key] = {}

    def post(self, transfer: Sending, ready: Writes, now: float) -> None:
        """Post what is ready, and count it as posted."""
        transfer.posted = ready.front
        transfer.committed = transfer.all_posted and transfer.pinned
        total = transfer.parts + len(ready.plans) if transfer.committed else 0
        for copy in ready.plans:
            self._post(transfer, copy, total, now)

    def _post(self, transfer: Sending, copy: Plan, total: int, now: float) -> None:
        """`total`: how many parts the transfer has, which its last notice says; 0 while more may come."""
        assert transfer.caller is not None
        self._last_op += 1
        op = OpId(self._last_op)
        if not transfer.ops:
            transfer.wire_since = now
        transfer.ops.add(op)
        self._keys[op] = transfer.key
        transfer.parts += 1
        transfer.nbytes += copy.total_bytes
        transfer.descriptors += copy.descriptors
        transfer.at.setdefault("first_posted", now)
        transfer.at["posted"] = now
        parts = total if transfer.parts == total else 0
        caller = transfer.caller
        self._outbox.send(caller.link, caller.epoch, Writing(transfer.key))
        notice = encode_notice(caller.epoch, transfer.key, transfer.parts - 1, parts)
        self._outbox.effect(Post(op, caller.name, copy, notice))

    def key_of(self, op: OpId) -> Key | None:
        """The transfer of an operation that has not stopped."""
        return self._keys.get(op)

    def stopped(self, op: OpId, transfer: Sending, now: float) -> None:
        """An operation has stopped."""
        del self._keys[op]
        transfer.ops.discard(op)
        transfer.torn.discard(op)
        if not transfer.ops:
            transfer.wire_s += now - transfer.wire_since

    def __len__(self) -> int:
        return len(self._keys)
