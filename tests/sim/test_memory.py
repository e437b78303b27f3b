from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from sim.caches import BLOCK_SIZE, HEADS, LAYERS, blocks_outermost, layers_apart

from kvpush.sim import kvfunc
from kvpush.sim.memory import KVMemory, Tensor

Caches = Callable[[], tuple[NDArray[np.uint8], list[Tensor]]]
ALL = slice(None)


@pytest.fixture(params=[layers_apart, blocks_outermost])
def caches(request: pytest.FixtureRequest) -> tuple[NDArray[np.uint8], list[Tensor]]:
    make: Caches = request.param
    return make()


def written(memory: KVMemory, blocks: list[int], tokens: int) -> tuple[kvfunc.Words, kvfunc.Words]:
    """Lines and seeds of a prompt that has just been written."""
    positions = np.arange(tokens, dtype=np.int64)
    lines = memory.lines(np.array(blocks, dtype=np.int64), positions)
    seeds = kvfunc.line_seeds(positions + 100, positions)
    memory.write(lines, seeds, ALL)
    return lines, seeds


def test_memory_gives_back_every_word_it_wrote(caches: tuple[NDArray[np.uint8], list[Tensor]]) -> None:
    memory = KVMemory(*caches)
    assert memory.planes == LAYERS * HEADS
    lines, seeds = written(memory, [7, 2, 9], 10)
    assert not len(memory.wrong_tokens(lines, seeds))
    planes = np.arange(memory.planes, dtype=np.int64)
    first = memory.read(np.repeat(lines[:1], memory.planes), planes)
    assert (first == kvfunc.kv_words(seeds[:1], kvfunc.plane_salts(memory.planes))[:, 0]).all()


def test_prompts_in_other_blocks_leave_each_other_alone(caches: tuple[NDArray[np.uint8], list[Tensor]]) -> None:
    memory = KVMemory(*caches)
    lines, seeds = written(memory, [0, 1, 2], 12)
    written(memory, [5, 4, 3], 12)
    assert not len(memory.wrong_tokens(lines, seeds))


def test_any_single_wrong_word_is_found(caches: tuple[NDArray[np.uint8], list[Tensor]]) -> None:
    buffer, tensors = caches
    memory = KVMemory(buffer, tensors)
    lines, seeds = written(memory, [3, 8], 8)
    used = np.flatnonzero(buffer.view(np.int64))
    assert len(used) == 8 * memory.planes
    for word in used:
        buffer.view(np.int64)[word] ^= 1
        assert len(memory.wrong_tokens(lines, seeds)) == 1
        buffer.view(np.int64)[word] ^= 1


def test_block_of_another_prompt_is_found_wrong_at_its_positions(
    caches: tuple[NDArray[np.uint8], list[Tensor]],
) -> None:
    memory = KVMemory(*caches)
    _, seeds = written(memory, [0, 1, 2], 12)
    swapped = memory.lines(np.array([0, 2, 1], dtype=np.int64), np.arange(12, dtype=np.int64))
    assert memory.wrong_tokens(swapped, seeds).tolist() == list(range(BLOCK_SIZE, 12))


def test_layers_of_unequal_shape_are_refused() -> None:
    buffer, tensors = layers_apart()
    odd = Tensor(0, (1, 1, 1, 32), (32, 32, 32))
    with pytest.raises(ValueError, match="differ"):
        KVMemory(buffer, [*tensors, odd])
