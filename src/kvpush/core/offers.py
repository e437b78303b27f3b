"""What a receiver may ask a sender for, and what one is told that wants to read: pure functions."""

from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.inbound import Caller
from kvpush.core.layout import Blocks, Layout, check_blocks, check_span
from kvpush.core.messages import Register
from kvpush.core.mode import Mode, in_words
from kvpush.core.sending import Sending


def check_registration(caller: Caller, message: Register, known: Sending | None) -> None:
    """Raises `RemoteProtocolError` naming the field that is wrong. `known` is the transfer with this key, if there is
    one: the same registration again is a repetition, another one is refused."""
    _check_wish(caller, message)
    if known is not None and known.caller is not None and not known.is_registered_as(caller, message):
        detail = f"{message.key} is registered by {known.caller.name} for {known.span} already"
        raise RemoteProtocolError(Reason.DUPLICATE_KEY, detail, "key")


def _check_wish(caller: Caller, message: Register) -> None:
    if message.mode not in caller.modes:
        detail = f"this pair can {in_words(caller.modes)}, the registration wants to {message.mode}"
        raise RemoteProtocolError(Reason.INCOMPATIBLE, detail, "mode")
    if message.mode is Mode.PUSH:
        check_blocks(caller.layout, message.span, message.blocks)
        return
    check_span(message.span)
    if message.blocks:
        raise RemoteProtocolError(Reason.BAD_BLOCK, "a receiver that reads has no blocks to name", "blocks")


def can_offer(transfer: Sending) -> bool:
    """Whether all of it is final and pinned, and the token is there if it is wanted. Raises `ValueError` when the
    prompt is shorter than the span."""
    if transfer.pinned and transfer.final.tokens < transfer.span.end:
        raise ValueError(f"the prompt has {transfer.final.tokens} tokens here, {transfer.span.end} were asked for")
    return transfer.may_commit


def offered_blocks(transfer: Sending, ours: Layout) -> Blocks:
    """Those of our blocks that hold the span."""
    first, last = transfer.span.start, transfer.span.end
    pairs = zip(ours.groups, transfer.blocks, strict=True)
    return tuple(ids[first // group.block_size : -(-last // group.block_size)] for group, ids in pairs)
