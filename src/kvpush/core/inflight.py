"""The writes that a sender has posted and that have not stopped, and those that wait their turn. Owned by its `Sender`.

To each receiver only so many bytes are under way at a time (`window_bytes`); what is more waits here. Turns go by
bytes: each transfer has a clock that runs with what it is given, and whose clock is behind is next. So a small transfer
waits for what is under way, however much a large one has still to write, and a slow receiver holds up nobody else.
"""

import heapq
from dataclasses import dataclass, field

from kvpush.core.effects import Post
from kvpush.core.ids import Key, OpId, PeerName
from kvpush.core.messages import encode_notice
from kvpush.core.outbox import Outbox
from kvpush.core.planner import Plan
from kvpush.core.sending import Sending

_LEAST_BYTES = 64 << 10
"""What a write counts for at least: it has costs of its own."""

_Turn = tuple[int, int, Post]
"""The clock of a transfer at which a write may go, the order in which they came, and the write."""


@dataclass
class _Lane:
    """One receiver: the bytes under way to it, the writes that wait, and how far the clocks have come."""

    under_way: int = 0
    clock: int = 0
    waiting: list[_Turn] = field(default_factory=list)


@dataclass(frozen=True)
class _Op:
    key: Key
    peer: PeerName
    nbytes: int


class InFlight:
    """Which transfer each operation belongs to; each is also in its transfer's `ops`."""

    def __init__(self, window_bytes: int, outbox: Outbox) -> None:
        self._window = window_bytes
        self._outbox = outbox
        self._ops: dict[OpId, _Op] = {}
        self._lanes: dict[PeerName, _Lane] = {}
        self._last = 0

    def post(self, transfer: Sending, copy: Plan, total: int, now: float) -> None:
        """Post one part of a transfer when it is its turn. `total`: how many parts it has, which its last notice says;
        0 while more may come."""
        assert transfer.caller is not None
        self._last += 1
        op, peer = OpId(self._last), transfer.caller.name
        self._ops[op] = _Op(transfer.key, peer, max(copy.total_bytes, _LEAST_BYTES))
        transfer.add_part(op, copy, now)
        parts = total if transfer.parts == total else 0
        token = transfer.token if parts and transfer.wants_token else None
        notice = encode_notice(transfer.caller.epoch, transfer.key, transfer.parts - 1, parts, token)
        lane = self._lanes.setdefault(peer, _Lane())
        turn = max(lane.clock, transfer.clock)
        transfer.clock = turn + self._ops[op].nbytes
        heapq.heappush(lane.waiting, (turn, op, Post(op, peer, copy, notice)))
        self._fill(lane)

    def _fill(self, lane: _Lane) -> None:
        """Let go what has room; something always has when nothing is under way."""
        while lane.waiting:
            turn, op, post = lane.waiting[0]
            nbytes = self._ops[OpId(op)].nbytes
            if lane.under_way and lane.under_way + nbytes > self._window:
                return
            heapq.heappop(lane.waiting)
            lane.clock = turn
            lane.under_way += nbytes
            self._outbox.effect(post)

    def give_up(self, transfer: Sending) -> None:
        """Nothing more of a transfer is to be posted: let go what waits, for whoever posts to find that out."""
        lane = self._lanes.get(transfer.caller.name) if transfer.caller is not None else None
        for turn in [turn for turn in lane.waiting if turn[2].op in transfer.ops] if lane is not None else ():
            assert lane is not None
            lane.waiting.remove(turn)
            lane.under_way += self._ops[turn[2].op].nbytes
            self._outbox.effect(turn[2])
        if lane is not None:
            heapq.heapify(lane.waiting)

    def key_of(self, op: OpId) -> Key | None:
        """Whose it is; None when it has stopped, or never was."""
        found = self._ops.get(op)
        return found.key if found is not None else None

    def stopped(self, op: OpId) -> Key | None:
        """An operation is over: whose it was. Others may go now."""
        found = self._ops.pop(op, None)
        if found is None:
            return None
        lane = self._lanes[found.peer]
        lane.under_way -= found.nbytes
        self._fill(lane)
        if not (lane.under_way or lane.waiting):
            del self._lanes[found.peer]
        return found.key

    def __len__(self) -> int:
        return len(self._ops)
