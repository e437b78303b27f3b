"""Prefix blocks: equal exactly where the text is, bounded, and forgotten oldest first."""

from hypothesis import given
from hypothesis import strategies as st

from kvpush.router.prefixes import BLOCK_BYTES, MAX_BLOCKS_PER_PROMPT, Prefixes, prefix_hashes


def text(*blocks: int) -> bytes:
    return b"".join(bytes([block]) * BLOCK_BYTES for block in blocks)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8), st.binary(max_size=255))
def test_two_prompts_share_exactly_their_common_leading_blocks(ours: list[int], theirs: list[int], tail: bytes) -> None:
    common = 0
    while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
        common += 1
    known = Prefixes()
    known.add(prefix_hashes(text(*ours), "m"))
    # the tail is shorter than a block, so it adds none
    assert known.matched(prefix_hashes(text(*theirs) + tail, "m")) == common


def test_other_seed_shares_nothing() -> None:
    known = Prefixes()
    known.add(prefix_hashes(text(1, 2), "model-a"))
    assert known.matched(prefix_hashes(text(1, 2), "model-b")) == 0


def test_last_blocks_of_the_oldest_prompt_are_forgotten_first() -> None:
    known = Prefixes(capacity=4)
    old, new = prefix_hashes(text(1, 2, 3), ""), prefix_hashes(text(7, 8), "")
    known.add(old)
    known.add(new)
    assert len(known) == 4
    assert known.matched(new) == 2
    assert known.matched(old) == 2


def test_hashes_of_one_prompt_are_bounded() -> None:
    assert len(prefix_hashes(b"x" * (BLOCK_BYTES * (MAX_BLOCKS_PER_PROMPT + 10)), "")) == MAX_BLOCKS_PER_PROMPT


def test_restarted_engine_is_known_to_have_nothing() -> None:
    known = Prefixes()
    known.add(prefix_hashes(text(1), ""))
    known.clear()
    assert known.matched(prefix_hashes(text(1), "")) == 0
