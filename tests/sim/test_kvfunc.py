import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.sim import kvfunc

PLANES = 12
VOCABULARY = 500
PROMPT = list(range(10, 42))


def test_expected_tokens_are_the_same_in_one_go_and_one_by_one() -> None:
    together = kvfunc.expected_tokens(PROMPT, 20, PLANES, VOCABULARY)
    context = list(PROMPT)
    for token in together:
        assert kvfunc.expected_tokens(context, 1, PLANES, VOCABULARY) == [token]
        context.append(token)


@pytest.mark.parametrize("changed", range(len(PROMPT)))
def test_some_later_token_depends_on_each_prompt_token(changed: int) -> None:
    other = [token + (i == changed) for i, token in enumerate(PROMPT)]
    answers = [kvfunc.expected_tokens(prompt, 40, PLANES, VOCABULARY) for prompt in (PROMPT, other)]
    assert answers[0] != answers[1]


def test_tokens_are_never_special_and_rarely_repeat() -> None:
    tokens = kvfunc.expected_tokens(PROMPT, 200, PLANES, VOCABULARY)
    assert all(kvfunc.FIRST_TOKEN <= token < VOCABULARY for token in tokens)
    assert len(set(tokens)) > 100


def test_kv_words_differ_between_tokens_positions_and_planes() -> None:
    tokens, positions = (grid.ravel() for grid in np.meshgrid(np.arange(50), np.arange(50)))
    words = kvfunc.kv_words(kvfunc.line_seeds(tokens, positions), kvfunc.plane_salts(PLANES))
    assert words.shape == (PLANES, 2500)
    assert len(np.unique(words)) == words.size


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_spots_lie_within_their_context_and_include_the_last_position(contexts: list[int]) -> None:
    lengths = np.array(contexts, dtype=np.int64)
    positions, planes = kvfunc.spots(lengths, PLANES)
    assert positions.shape == planes.shape == (len(contexts), kvfunc.SPOTS)
    assert (positions >= 0).all()
    assert (positions < lengths[:, None]).all()
    assert (positions[:, 0] == lengths - 1).all()
    assert ((planes >= 0) & (planes < PLANES)).all()
