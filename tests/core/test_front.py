"""Stairs of tokens and layers: what is added between two of them is all of it, and nothing twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush.core.errors import LocalProtocolError
from kvpush.core.front import NOWHERE, Front, Patch
from kvpush.core.layout import Layers, Span

LAYERS = 6

_layers = st.none() | st.integers(1, LAYERS)


def cells(front: Front) -> set[tuple[int, int]]:
    return {(layer, token) for layer in range(LAYERS) for token in range(front.at(layer))}


@given(st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(1, LAYERS - 1), max_size=3)), max_size=6))
def test_patches_cover_a_growing_front_exactly(chunks: list[tuple[int, list[int]]]) -> None:
    front, seen, tokens = NOWHERE, set[tuple[int, int]](), 0
    for more, cuts in chunks:
        tokens += more
        for layers in (*sorted(set(cuts)), None):
            later = front.grown(tokens, layers)
            for patch in front.patches_to(later, LAYERS):
                new = {
                    (layer, token)
                    for layer in range(patch.layers.first, patch.layers.last)
                    for token in range(patch.span.start, patch.span.end)
                }
                assert not new & seen
                seen |= new
            front = later
            assert seen == cells(front)


@given(st.integers(0, 20), _layers)
def test_patches_to_the_same_front_are_none(tokens: int, layers: int | None) -> None:
    front = NOWHERE.grown(tokens, layers)
    assert not list(front.patches_to(front, LAYERS))


@given(st.integers(0, LAYERS - 1), st.integers(1, LAYERS), st.integers(1, 9))
def test_pieces_of_a_patch_are_all_of_it_in_equal_parts(first: int, count: int, pieces: int) -> None:
    patch = Patch(Span(3, 8), Layers(first, first + count))
    split = list(patch.split(pieces))

    assert [piece.span for piece in split] == [patch.span] * min(pieces, count)
    layers = [layer for piece in split for layer in range(*piece.layers)]
    assert layers == list(range(first, first + count))
    sizes = [piece.layers.last - piece.layers.first for piece in split]
    assert max(sizes) - min(sizes) <= 1


def test_whole_chunk_is_one_patch() -> None:
    (patch,) = Front.flat(4).patches_to(Front.flat(9), LAYERS)
    assert (patch.span.start, patch.span.end, tuple(patch.layers)) == (4, 9, (0, LAYERS))


def test_front_that_would_shrink_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="from 9 to 8"):
        Front.flat(9).grown(8, None)
