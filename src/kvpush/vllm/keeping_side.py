"""The connector in the scheduler's process, for finished requests whose conversation may go on elsewhere.

Owned by vLLM's engine thread. What is kept has a reference of ours on its blocks, so that it does not need vLLM's
prefix cache, and is the first to go: when more than `share` of the pool would be kept, and as soon as vLLM lacks
blocks. They are released in two steps, because a peer may be receiving them already: `Release` goes to the ranks, and
when each has reported the request as sent, the reference goes. That takes a step or two, in which vLLM waits rather
than preempts.
"""

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from kvpush.core.commands import Command, Keep, Promise, Release
from kvpush.core.digests import GRANULE, NO_DIGESTS
from kvpush.core.ids import Key, RequestId
from kvpush.core.layout import Blocks
from kvpush.vllm.kept import KeptBlocks
from kvpush.vllm.settings import Keeping
from kvpush.vllm.tokens import digests_of_first

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

PATIENCE_STEPS = 8
"""For how many steps vLLM is told that blocks are about to be free. They normally are after two."""

_GOOD_ENDS = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class _Kept:
    """One finished request: how many blocks it holds, and for how many more steps to wait for them once they have been
    asked back (None: they have not)."""

    __slots__ = ("blocks", "key", "patience")

    def __init__(self, key: Key, blocks: int) -> None:
        self.key = key
        self.blocks = blocks
        self.patience: int | None = None


class KeepingSide:
    """All that one engine keeps, oldest first."""

    def __init__(self, keeping: Keeping, block_sizes: tuple[int, ...], say: Callable[[Command], None]) -> None:
        """`say` passes a command on."""
        self._keeping = keeping
        self._block_sizes = block_sizes
        self._say = say
        self._wanted: dict[str, Key] = {}
        self._kept: dict[str, _Kept] = {}
        self._asking: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        self._pool: BlockPool | None = None
        self._pins = KeptBlocks()

    def bind(self, pool: "BlockPool") -> None:
        """vLLM's block pool exists."""
        self._pool = pool
        self._pins.bind(pool)

    # requests -------------------------------------------------------------------------------------------
    def want(self, request_id: str, key: Key) -> None:
        """A request has arrived that is to be kept when it has finished."""
        if self._keeping.share > 0:
            self._wanted[request_id] = key
            self._say(Promise(key))

    def finished(self, request: Request, blocks: tuple[list[int], ...]) -> None:
        """vLLM is done with a request, and has not freed its blocks yet."""
        key = self._wanted.pop(request.request_id, None)
        if key is not None and not self._keep(request, key, blocks):
            self._say(Release(key))

    def _keep(self, request: Request, key: Key, blocks: tuple[list[int], ...]) -> bool:
        """Whether it can be kept. All but the last token have been through the model; whole granules of them can be
        asked for."""
        if request.status not in _GOOD_ENDS:
            return False
        computed = min(int(request.num_tokens) - 1, int(request.num_computed_tokens))
        tokens = computed - computed % GRANULE
        digests = digests_of_first(request, tokens)
        ids = self._first_blocks(blocks, tokens)
        if digests == NO_DIGESTS or not self._make_room(sum(len(group) for group in ids)):
            return False
        self._pins.keep(request.request_id, chain.from_iterable(ids))
        self._kept[request.request_id] = _Kept(key, sum(len(group) for group in ids))
        self._say(Keep(key, RequestId(request.request_id), tokens, ids, digests, self._keeping.seconds))
        return True

    def _first_blocks(self, blocks: tuple[list[int], ...], tokens: int) -> Blocks:
        pairs = zip(blocks, self._block_sizes, strict=True)
        return tuple(tuple(group[: -(-tokens // size)]) for group, size in pairs)

    def _make_room(self, blocks: int) -> bool:
        """Whether so many more blocks are within our share, once older ones have been released."""
        assert self._pool is not None, "vLLM has not bound its block pool"
        room = int(self._keeping.share * self._pool.num_gpu_blocks) - blocks
        if room < 0:
            return False
        held = sum(kept.blocks for kept in self._kept.values() if kept.patience is None)
        self._release(held - room)
        return True

    def _release(self, blocks: int) -> None:
        """Ask for at least so many blocks back, those of the oldest first."""
        for kept in self._kept.values():
            if blocks <= 0:
                return
            if kept.patience is None:
                kept.patience = PATIENCE_STEPS
                self._say(Release(kept.key))
                blocks -= kept.blocks

    def freed(self, request_id: str) -> bool:
        """All ranks have sent what was kept, or never will. Returns whether it was kept here."""
        if self._kept.pop(request_id, None) is None:
            return False
        self._pins.release(request_id)
        return True

    # pressure -------------------------------------------------------------------------------------------
    def hungers(self, request: Request, computed: int) -> None:
        """vLLM is about to look for blocks for the tokens after the first `computed` of a request."""
        self._asking[request.request_id] = self._blocks_for(request, computed)

    def loaded(self, request: Request) -> None:
        """A request has received what it was to receive. vLLM does not say when it looks for blocks for the rest."""
        self._loaded[request.request_id] = self._blocks_for(request, int(request.num_computed_tokens))

    def _blocks_for(self, request: Request, computed: int) -> int:
        tokens = int(request.num_tokens)
        return sum(-(-tokens // size) - computed // size for size in self._block_sizes)

    def fed(self, request_id: str) -> None:
        """vLLM has found them, or the request is gone."""
        self._asking.pop(request_id, None)
        self._loaded.pop(request_id, None)

    def step(self, scheduled_tokens: int) -> None:
        """A step of so many tokens has been scheduled. Who has been looking for blocks and has got none lacks ours. So
        does who has loaded its prompt, when nobody is scheduled at all."""
        if not (self._asking or self._loaded or self._kept):
            return
        hungry, self._asking = sum(self._asking.values()), {}
        if not scheduled_tokens:
            hungry += sum(self._loaded.values())
        if hungry:
            self._relieve(hungry)
        for kept in self._kept.values():
            if kept.patience:
                kept.patience -= 1

    def relieve_running(self) -> bool:
        """vLLM has no block for a running request, and would preempt one. Whether to wait a step instead."""
        self._relieve(1)
        return any(kept.patience for kept in self._kept.values())

    def _relieve(self, needed: int) -> None:
        """What vLLM sets aside for others is not known here: so at least one is released, whatever the pool says."""
        assert self._pool is not None
        leaving = sum(kept.blocks for kept in self._kept.values() if kept.patience is not None)
        missing = needed - int(self._pool.get_num_free_blocks())
        self._release(max(missing, 1) - leaving)

    def release_all(self) -> None:
        """What was computed is worth nothing any more."""
        self._release(sum(kept.blocks for kept in self._kept.values()))

    def __len__(self) -> int:
        return len(self._kept)
