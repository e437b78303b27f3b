"""Either engine may have any part of a prompt already, in blocks of its own size."""

from itertools import product

import pytest
from engines.calls import Ask
from engines.harness import Pair, eventually, new_id, prompt_of

pytestmark = pytest.mark.engine

_SIZES = [
    pytest.param(
        tuple({"block_size": size, "extra": {"port": 0, "mode": mode}} for size in sizes),
        id="prefill{}-decode{}-{}".format(*sizes, mode),
    )
    for mode, sizes in (
        ("push", (32, 32)),
        ("push", (32, 128)),
        ("push", (128, 32)),
        ("pull", (32, 128)),
        ("pull", (128, 32)),
    )
]


def _warm(engine_blocks: int, prompt: tuple[int, ...], size: int) -> Ask:
    """A plain request that leaves that many blocks of the prompt in the cache."""
    return Ask(request_id=new_id(), prompt=prompt[: engine_blocks * size + 1], max_tokens=1)


@pytest.mark.parametrize("pair", _SIZES, indirect=True)
def test_pair_answers_as_one_engine_whatever_part_either_has(pair: Pair) -> None:
    mine, theirs = pair.prefill.config.block_size, pair.decode.config.block_size
    prompt = prompt_of(2 * max(mine, theirs) + 37)
    (expected,) = pair.plain(Ask(request_id=new_id(), prompt=prompt))

    for j, k in product(_some(len(prompt) // mine), _some(len(prompt) // theirs)):
        pair.forget()
        pair.prefill.ask(_warm(j, prompt, mine))
        pair.decode.ask(_warm(k, prompt, theirs))
        before = pair.decode.look()
        (answer,) = pair.ask(Ask(request_id=new_id(), prompt=prompt))
        after = pair.decode.look()

        where = f"prefill engine had {j} blocks of {mine}, decode engine {k} of {theirs}"
        assert answer.tokens == expected.tokens, where
        moved = after.nbytes["receiver"] - before.nbytes.get("receiver", 0)
        assert moved == (len(prompt) - k * theirs) * _TOKEN_BYTES, where
        assert answer.cached_tokens >= k * theirs, where
    pair.assert_nothing_held()


_TOKEN_BYTES = 8 * 4 * 2 * 64 * 4  # layers x heads x key and value x head size x float32


def _some(blocks: int) -> list[int]:
    """None, one, about half, all."""
    return sorted({0, 1, blocks // 2, blocks})


def test_pair_moves_nothing_when_the_decode_engine_has_everything(pair: Pair) -> None:
    prompt = prompt_of(65, seed=9)
    (expected,) = pair.plain(Ask(request_id=new_id(), prompt=prompt))
    pair.decode.ask(Ask(request_id=new_id(), prompt=prompt))
    before = pair.decode.look()

    (answer,) = pair.ask(Ask(request_id=new_id(), prompt=prompt))

    assert answer.tokens == expected.tokens
    key = "receiver delivered not_needed"
    eventually(lambda: pair.decode.settled().transfers.get(key, 0) == before.transfers.get(key, 0) + 1)
    assert pair.decode.look().nbytes.get("receiver", 0) == before.nbytes.get("receiver", 0)
    pair.assert_nothing_held()
