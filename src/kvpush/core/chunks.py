"""What of a transfer can be written next, and how: pure functions of its record."""

from collections.abc import Iterator
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from kvpush.core.front import Front, Patch
from kvpush.core.layout import Layers, Layout
from kvpush.core.planner import Plan, empty_plan, plan
from kvpush.core.sending import Sending

POST_BYTES = 8 << 20
"""A post to a process on the same host copies all of it before it returns, 2 to 3 ms for this much. Between two posts
the transfer thread attends to everything else."""

LEAST_WIRE_S = 0.001
"""A write has fixed costs (planning, a wake-up on either side, a notice), some 0.5 ms of two threads. Layers ahead
of the rest are written only if that saves more than it costs."""


class Writes(NamedTuple):
    """What to post now, and what will have been posted then. `held`: layers are ahead of the rest, but wait for it."""

    plans: tuple[Plan, ...]
    front: Front
    held: bool = False


def next_writes(transfer: Sending, ours: Layout) -> Writes:
    """The writes of all that is final, registered and not posted yet; none when nothing new is.

    A prompt that was complete when it was posted, but not pinned, needs one more without any data: only when its blocks
    cannot be used for anything else any more may the receiver be told that it has everything. It may want a token with
    that, too. Raises
    `ValueError` when the prompt is shorter than the span, or the blocks do not hold what they should.
    """
    if transfer.pinned and transfer.final.tokens < transfer.span.end:
        raise ValueError(f"the prompt has {transfer.final.tokens} tokens here, {transfer.span.end} were asked for")
    front = writable(transfer, ours)
    if not pays(transfer, front, ours):
        return Writes((), transfer.posted, held=True)
    patches = transfer.posted.patches_to(front, _shape(ours).layers)
    plans = tuple(plan_patch(transfer, piece, ours) for patch in patches for piece in pieces_of(patch, ours))
    complete = front.tokens >= transfer.span.end and transfer.may_commit and not transfer.committed
    return Writes(plans or (empty_plan(),) if complete else plans, front)


def writable(transfer: Sending, ours: Layout) -> Front:
    """How far the writes may go: up to the end of the span where all of it is final; before that, only blocks that
    are whole on both sides. Never less than what the span begins with."""
    assert transfer.caller is not None
    start, end = transfer.span.start, transfer.span.end
    sizes = [group.block_size for layout in (ours, transfer.caller.layout) for group in layout.groups]
    whole = lcm(*sizes)
    return transfer.final.each(lambda tokens: max(start, end if tokens >= end else tokens - tokens % whole))


def pays(transfer: Sending, front: Front, ours: Layout) -> bool:
    """Whether it is worth a write of its own to go up to `front` now. Whole chunks always are, and so is what is
    ahead in a few layers as long as nobody knows how fast the pair is."""
    pace = transfer.caller.pace if transfer.caller is not None else None
    if pace is None or front.ahead <= front.tokens:
        return True
    shape = _shape(ours)
    nbytes = sum(_bytes_of(patch, shape) for patch in transfer.posted.patches_to(front, shape.layers))
    return nbytes == 0 or nbytes >= pace * LEAST_WIRE_S


def pieces_of(patch: Patch, ours: Layout) -> Iterator[Patch]:
    """A patch in pieces of `POST_BYTES` at most, but for layers that have more than that."""
    shape = _shape(ours)
    return patch.split(max(1, -(-_bytes_of(patch, shape) // POST_BYTES)))


def plan_patch(transfer: Sending, patch: Patch, ours: Layout) -> Plan:
    """How to copy a patch into the receiver's blocks. Raises `ValueError` when the blocks do not hold it."""
    assert transfer.caller is not None
    theirs = transfer.caller.layout
    start, layers = transfer.span.start, None if patch.layers == Layers(0, _shape(ours).layers) else patch.layers
    return plan(patch.span, ours, transfer.blocks, 0, theirs, transfer.remote_blocks, start, layers)


class _Shape(NamedTuple):
    layers: int
    token_bytes: int


def _bytes_of(patch: Patch, shape: _Shape) -> int:
    return patch.span.tokens * shape.token_bytes * (patch.layers.last - patch.layers.first) // shape.layers


@lru_cache(maxsize=16)
def _shape(layout: Layout) -> _Shape:
    return _Shape(len(layout.layers), layout.token_bytes)
