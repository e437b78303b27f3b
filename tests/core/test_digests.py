"""What two prompts have in common, found by their digests."""

from hypothesis import given
from hypothesis import strategies as st

from kvpush.core.digests import DIGEST_BYTES, GRANULE, Digests, digests_of, tokens_covered, tokens_in_common

_TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=5 * GRANULE)


@given(_TOKENS, _TOKENS, _TOKENS)
def test_prompts_have_whole_granules_of_their_common_beginning_in_common(
    common: list[int], mine: list[int], theirs: list[int]
) -> None:
    a, b = common + mine, common + theirs
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert tokens_in_common(digests_of(a), digests_of(b)) == same - same % GRANULE


@given(_TOKENS)
def test_prompt_has_a_digest_for_each_whole_granule(tokens: list[int]) -> None:
    digests = digests_of(tokens)
    assert len(digests) == len(tokens) // GRANULE * DIGEST_BYTES
    assert tokens_covered(digests) == len(tokens) - len(tokens) % GRANULE


def test_prompts_with_different_seeds_have_nothing_in_common() -> None:
    tokens = range(3 * GRANULE)
    assert tokens_in_common(digests_of(tokens, b"one adapter"), digests_of(tokens, b"another")) == 0


def test_digests_are_the_same_in_every_process() -> None:
    assert digests_of(range(GRANULE)) == Digests(bytes.fromhex(_KNOWN))


_KNOWN = "855fe456097cc2f35054e4c3fb92d55c"
