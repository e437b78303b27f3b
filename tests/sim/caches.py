"""KV cache memory without vLLM, in the layouts that its tensors come in."""

import numpy as np
from numpy.typing import NDArray

from kvpush.sim.memory import Tensor

BLOCKS, HEADS, BLOCK_SIZE, LINE = 12, 2, 4, 32  # LINE in bytes
LAYERS = 3
_TOKEN = LINE
_HEAD = BLOCK_SIZE * _TOKEN
_BLOCK = HEADS * _HEAD


def layers_apart() -> tuple[NDArray[np.uint8], list[Tensor]]:
    """Layer after layer, each [block, head, token]."""
    tensors = [
        Tensor(layer * BLOCKS * _BLOCK, (BLOCKS, HEADS, BLOCK_SIZE, LINE), (_BLOCK, _HEAD, _TOKEN))
        for layer in range(LAYERS)
    ]
    return np.zeros(LAYERS * BLOCKS * _BLOCK, dtype=np.uint8), tensors


def blocks_outermost() -> tuple[NDArray[np.uint8], list[Tensor]]:
    """Block after block, with all layers in each."""
    tensors = [
        Tensor(layer * _BLOCK, (BLOCKS, HEADS, BLOCK_SIZE, LINE), (LAYERS * _BLOCK, _HEAD, _TOKEN))
        for layer in range(LAYERS)
    ]
    return np.zeros(LAYERS * BLOCKS * _BLOCK, dtype=np.uint8), tensors
