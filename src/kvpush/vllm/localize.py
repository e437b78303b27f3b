"""A scheduler's command as one worker rank must see it: its own blocks, and the peer's rank of its number."""

from typing import TypeVar

from msgspec.structs import replace

from kvpush.core.commands import Command, Disown, Expect, Final, Inquire, Keep, Receive
from kvpush.core.ids import Address, Target
from kvpush.core.layout import Span
from kvpush.vllm.layouts import CacheLayout
from kvpush.vllm.ranks import Rank

_C = TypeVar("_C", bound=Command)


def localize(command: _C, rank: Rank, cache: CacheLayout) -> _C:
    """The command with its target's address and its block ids as this rank counts them."""
    if isinstance(command, Expect | Disown | Inquire):
        return replace(command, target=_paired(command.target, rank))
    if isinstance(command, Receive):
        blocks = cache.expand(command.blocks, command.span)
        return replace(command, target=_paired(command.target, rank), blocks=blocks)
    if isinstance(command, Final | Keep):
        return replace(command, blocks=cache.expand(command.blocks, Span(0, command.tokens)))
    return command


def _paired(target: Target, rank: Rank) -> Target:
    return replace(target, address=Address(target.address.host, target.address.port + rank.index))
