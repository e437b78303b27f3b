"""The reads of a receiver that have been posted and have not stopped."""

from collections.abc import Iterator

from kvpush.core.chunks import pieces_of
from kvpush.core.effects import PostRead
from kvpush.core.front import Patch
from kvpush.core.ids import Key, OpId, PeerName
from kvpush.core.layout import Blocks, Layers, Layout
from kvpush.core.outbox import Outbox
from kvpush.core.planner import Plan, plan
from kvpush.core.receiving import Receiving


class ReadOps:
    """Which transfer each operation belongs to."""

    def __init__(self, layout: Layout, outbox: Outbox) -> None:
        self._layout = layout
        self._outbox = outbox
        self._last_op = 0
        self._keys: dict[OpId, Key] = {}

    def post(self, transfer: Receiving, peer: PeerName, theirs: Layout, blocks: Blocks, now: float) -> None:
        """Read the transfer's span from `blocks` of a sender that the transport knows as `peer`."""
        transfer.at["posted"] = now
        for copy in list(self._plans(transfer, theirs, blocks)):
            self._last_op -= 1
            op = OpId(self._last_op)
            transfer.ops.add(op)
            self._keys[op] = transfer.key
            transfer.reads += 1
            transfer.descriptors += copy.descriptors
            self._outbox.effect(PostRead(op, peer, copy))

    def _plans(self, transfer: Receiving, theirs: Layout, blocks: Blocks) -> Iterator[Plan]:
        span, ours = transfer.span, self._layout
        everything = Layers(0, len(ours.layers))
        for _, layers in pieces_of(Patch(span, everything), ours):
            part = None if layers == everything else layers
            yield plan(span, ours, transfer.blocks, span.start, theirs, blocks, span.start, part)

    def key_of(self, op: OpId) -> Key | None:
        """The transfer of an operation that has not stopped."""
        return self._keys.get(op)

    def stopped(self, op: OpId) -> Key | None:
        """An operation has stopped; returns whose it was."""
        return self._keys.pop(op, None)

    def __len__(self) -> int:
        return len(self._keys)
