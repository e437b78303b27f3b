"""What is under way on the model check's data plane."""

from dataclasses import dataclass
from typing import TypeVar

from core.bounds import Bounds
from core.memory import make_layout

from kvpush.core.effects import PostRead
from kvpush.core.ids import Epoch, Key, OpId

T = TypeVar("T")
P, D = "p", "d"
LAYOUTS = {P: make_layout(0, 4, 16), D: make_layout(1, 4, 16)}
"""Those of the sender and the receiver."""
_BLOCK_BYTES = 4 * LAYOUTS[D].planes[0].token_stride


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
    by: str = P
    ended: bool = False


def without(items: tuple[T, ...], index: int) -> tuple[T, ...]:
    """All but one."""
    return items[:index] + items[index + 1 :]


def read_of(post: PostRead, bounds: Bounds, reader: Epoch, now: float) -> Writing:
    """A read that this life of the receiver posts; whose it is, its first block tells."""
    lives = (Epoch(int(post.peer.split("@")[1], 16)), reader)
    block = int(post.plan.local[0] - LAYOUTS[D].regions[0].base) // _BLOCK_BYTES
    return Writing(post.op, bounds.keys[block // bounds.blocks], lives, b"", post.plan.total_bytes, now, D)
