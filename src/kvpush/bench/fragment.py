"""Making an engine's KV pool look as it does after hours of service: free blocks in no order."""

import numpy as np

from kvpush.bench.client import Target
from kvpush.bench.load import Concurrency, offer
from kvpush.bench.workload import Prompt
from kvpush.core.errors import KVPushError
from kvpush.sim.kvfunc import FIRST_TOKEN

_CONCURRENCY = 48
_MOST_BLOCKS, _MOST_OUTPUT = 4, 32


class FragmentationFailed(KVPushError):
    """The engine did not serve the requests that were to fragment its pool."""


def fragment(target: Target, blocks: int, block_size: int, vocabulary: int, seed: int) -> None:
    """Fill and free all `blocks` of one engine's pool with short requests of unequal lengths and lives.

    vLLM hands out free blocks in the order in which they were freed, so afterwards neighbours are rare.
    """
    rng = np.random.default_rng(seed)
    prompts = []
    while blocks > 0:
        own = int(rng.integers(1, _MOST_BLOCKS + 1))
        tokens = rng.integers(FIRST_TOKEN, vocabulary, own * block_size - 1)
        prompts.append(Prompt(tuple(tokens.tolist()), int(rng.integers(1, _MOST_OUTPUT + 1))))
        blocks -= own
    answers = offer(target, prompts, Concurrency(_CONCURRENCY), f"fragment-{seed}", seed, lambda: None)
    if failed := [answer.error for answer in answers if answer.error]:
        raise FragmentationFailed(f"{target.url}: {len(failed)} of {len(prompts)} requests failed: {failed[0]}")
