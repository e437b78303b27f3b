"""Which prompt prefixes an engine has seen lately.

A prompt's raw JSON text is cut into blocks, and each block's hash covers everything before it, so that two prompts
share the hashes of exactly their common blocks. What an engine really has in its cache is not asked: it is
guessed from what was sent there, forgotten least recently used first, and wholly when the engine restarts.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

BLOCK_BYTES = 256
MAX_BLOCKS_PER_PROMPT = 2048
DEFAULT_CAPACITY = 200_000


def prefix_hashes(text: bytes, seed: Hashable) -> tuple[int, ...]:
    """One 64-bit hash per whole block of `text`; `seed` is what else must be equal for a prefix to be shared.

    Python's own keyed hash is used: fast, and a client cannot know which texts collide.
    """
    hashes = []
    chain = hash(seed)
    for start in range(0, min(len(text), MAX_BLOCKS_PER_PROMPT * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain = hash((chain, text[start : start + BLOCK_BYTES]))
        hashes.append(chain)
    return tuple(hashes)


class Prefixes:
    """The blocks one engine is believed to have; never more than `capacity`."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, hashes: Sequence[int]) -> int:
        """How many leading blocks the engine has."""
        for count, block in enumerate(hashes):
            if block not in self._blocks:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[int]) -> None:
        """The engine is about to see this prompt. Its first blocks are the last to be forgotten."""
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """The engine has restarted."""
        self._blocks.clear()
