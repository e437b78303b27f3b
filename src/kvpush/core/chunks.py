"""What of a transfer can be written next, and how: pure functions of its record."""

from math import lcm

from kvpush.core.layout import Layout, Span
from kvpush.core.planner import Plan, plan
from kvpush.core.sending import Sending


def next_chunk(transfer: Sending, ours: Layout) -> Span:
    """The tokens that are final, registered and not posted yet; may be empty, or even end before it starts.

    Up to the end when all of it is final; before that, only blocks that are whole on both sides.
    """
    assert transfer.caller is not None
    if transfer.tokens >= transfer.span.end:
        return Span(transfer.covered, transfer.span.end)
    sizes = [group.block_size for layout in (ours, transfer.caller.layout) for group in layout.groups]
    return Span(transfer.covered, transfer.tokens - transfer.tokens % lcm(*sizes))


def plan_chunk(transfer: Sending, chunk: Span, ours: Layout) -> Plan:
    """How to copy a chunk into the receiver's blocks. Raises `ValueError` when the blocks do not hold it."""
    assert transfer.caller is not None
    theirs = transfer.caller.layout
    return plan(chunk, ours, transfer.blocks, 0, theirs, transfer.remote_blocks, transfer.span.start)
