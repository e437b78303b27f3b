"""What a sender tells a receiver that wants to read: pure functions of the transfer's record."""

from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.inbound import Caller
from kvpush.core.layout import Blocks, Layout, check_blocks, check_span
from kvpush.core.messages import Register
from kvpush.core.mode import Mode, in_words
from kvpush.core.sending import Sending


def check_registration(caller: Caller, message: Register) -> None:
    """Raises `RemoteProtocolError` naming the field that is wrong."""
    if message.mode not in caller.modes:
        detail = f"this pair can {in_words(caller.modes)}, the registration wants to {message.mode}"
        raise RemoteProtocolError(Reason.INCOMPATIBLE, detail, "mode")
    if message.mode is Mode.PUSH:
        check_blocks(caller.layout, message.span, message.blocks)
        return
    check_span(message.span)
    if message.blocks:
        raise RemoteProtocolError(Reason.BAD_BLOCK, "a receiver that reads has no blocks to name", "blocks")


def is_same(known: Sending, caller: Caller, message: Register) -> bool:
    """Whether a registration is the repetition of one that we know."""
    what = (message.mode, message.span, message.blocks)
    return known.caller is not None and known.caller.epoch == caller.epoch and what == known.wish


def can_offer(transfer: Sending) -> bool:
    """Whether all of it is final and pinned. Raises `ValueError` when the prompt is shorter than the span."""
    if not transfer.pinned:
        return False
    if transfer.final.tokens < transfer.span.end:
        raise ValueError(f"the prompt has {transfer.final.tokens} tokens here, {transfer.span.end} were asked for")
    return True


def offered_blocks(transfer: Sending, ours: Layout) -> Blocks:
    """Those of our blocks that hold the span."""
    first, last = transfer.span.start, transfer.span.end
    pairs = zip(ours.groups, transfer.blocks, strict=True)
    return tuple(ids[first // group.block_size : -(-last // group.block_size)] for group, ids in pairs)
