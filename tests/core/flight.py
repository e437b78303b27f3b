"""What is under way on the model check's data plane."""

from dataclasses import dataclass
from typing import TypeVar

from kvpush.core.ids import Epoch, Key, OpId

T = TypeVar("T")


@dataclass(frozen=True)
class Writing:
    """A write in flight, from one life of the sender to one life of the receiver; or a read, which has no notice.
    `by` has posted it. `ended`: its poster has given it up, but it may still land."""

    op: OpId
    key: Key
    lives: tuple[Epoch, Epoch]
    notice: bytes
    nbytes: int
    posted_at: float
    by: str = "p"
    ended: bool = False


def without(items: tuple[T, ...], index: int) -> tuple[T, ...]:
    """All but one."""
    return items[:index] + items[index + 1 :]
