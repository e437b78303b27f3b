"""Blocks kept out of vLLM's free pool by a reference of ours, whatever becomes of the request that they belong to.

Owned by vLLM's engine thread. There are two reasons:

- *Quarantine.* A receive whose sender has gone fails at once, but a write that was posted before cannot be called back
  (R1). Its blocks get a reference of ours, so that vLLM can free the request's own and recompute it elsewhere, or end
  it; ours goes when every rank says that nothing can arrive any more.
- *Pins.* A prompt that is written before its request has finished must not be overwritten meanwhile (R2), should the
  request be preempted or aborted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass
class _Kept:
    """The blocks of one request; `ranks` is how many ranks have not released them."""

    blocks: list["KVCacheBlock"]
    ranks: int = 1


class KeptBlocks:
    """The blocks that are kept for one reason, by request."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._kept: dict[str, _Kept] = {}

    def bind(self, pool: "BlockPool") -> None:
        """The pool exists; called once, before any request."""
        self._pool = pool

    def keep(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Keep blocks, once more for each call. Must be called before vLLM frees them."""
        assert self._pool is not None, "vLLM has not bound its block pool"
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.ranks += 1
            return
        blocks = [self._pool.blocks[index] for index in block_ids]
        self._pool.touch(blocks)
        self._kept[request_id] = _Kept(blocks)

    def release(self, request_id: str) -> None:
        """Undo one `keep` of a request; nothing for requests that have none."""
        kept = self._kept.get(request_id)
        if kept is None:
            return
        kept.ranks -= 1
        if not kept.ranks:
            del self._kept[request_id]
            assert self._pool is not None
            self._pool.free_blocks(reversed(kept.blocks))

    def __len__(self) -> int:
        return len(self._kept)
