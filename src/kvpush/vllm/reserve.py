"""When a decode engine sets blocks aside for a prompt that another engine computes. Owned by vLLM's engine thread.

Blocks that wait for a prompt which itself waits in a queue elsewhere are missing to those that could decode. So while
there is plenty, blocks are set aside at once, and otherwise when the prefill engine has begun: when the prompt has
every block that it needs there.

This is also why two full pools cannot wait for each other for ever. What is set aside here before the other engine has
begun leaves room for the longest prompt that there may be. So whichever prompt is complete there fits in here, sooner
or later, and leaves its room there to the next.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class Reserve:
    """The part of the pool that is not for prompts whose prefill has not begun."""

    def __init__(self, share: float, block_size: int, longest: int) -> None:
        """`share` of the pool, and room for `longest` tokens at least; 0 keeps nothing back, 1 everything."""
        self._share = share
        self._block_size = block_size
        self._longest = longest
        self._pool: BlockPool | None = None

    def bind(self, pool: "BlockPool") -> None:
        """vLLM's block pool exists."""
        self._pool = pool

    @property
    def keeps_back(self) -> bool:
        """Whether any prompt has ever to wait."""
        return self._share > 0

    def allows(self, tokens: int) -> bool:
        """Whether blocks for `tokens` tokens may be set aside now, whatever the prefill engine does."""
        if not self.keeps_back or self._pool is None:
            return True
        kept = max(self._share * self._pool.num_gpu_blocks, self._blocks(self._longest))
        return bool(self._pool.get_num_free_blocks() - self._blocks(tokens) >= kept)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
