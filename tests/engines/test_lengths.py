"""Prompts around block boundaries, through two engines, compared token by token with one."""

import pytest
from engines.calls import Answer, Ask
from engines.harness import Pair, new_id, prompt_of

pytestmark = pytest.mark.engine

_SHAPES = [
    pytest.param(({"block_size": size, **extra}, {"block_size": size, **extra}), id=f"block{size}-{name}")
    for size in (32, 128)
    for name, extra in (
        ("cached", {"prefix_caching": True}),
        ("uncached", {"prefix_caching": False}),
        ("chunked", {"max_num_batched_tokens": 192, "max_num_seqs": 16}),
        ("pull", {"prefix_caching": True, "extra": {"port": 0, "mode": "pull"}}),
    )
]


def _asks(block: int) -> list[Ask]:
    lengths = (1, 2, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 1500)
    return [
        Ask(request_id=new_id(), prompt=prompt_of(length, seed=length), max_tokens=tokens)
        for length in lengths
        for tokens in (1, 16)
    ]


def _texts(answers: list[Answer]) -> dict[int, tuple[int, ...]]:
    return {index: answer.tokens for index, answer in enumerate(answers)}


@pytest.mark.parametrize("pair", _SHAPES, indirect=True)
def test_pair_answers_as_one_engine_for_each_prompt_length(pair: Pair) -> None:
    asks = _asks(pair.decode.config.block_size)
    expected = _texts(pair.plain(*asks))
    pair.forget()

    assert _texts(pair.ask(*_again(asks))) == expected
    delivered = pair.decode.look().transfers["receiver delivered ok"]
    assert _texts(pair.ask(*_again(asks))) == expected

    # a prompt of one token needs nothing: the decode engine computes its last token in any case
    assert delivered == len(asks) - 2
    assert set(pair.decode.look().transfers) <= {"receiver delivered ok", "receiver delivered not_needed"}
    pair.assert_nothing_held()


def _again(asks: list[Ask]) -> list[Ask]:
    return [Ask(request_id=new_id(), prompt=ask.prompt, max_tokens=ask.max_tokens) for ask in asks]
