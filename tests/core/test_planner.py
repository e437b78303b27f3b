"""Plans are carried out on real memory and compared byte for byte with the plainest possible copy."""

from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import pytest
from core.strided import AXES, BY_BLOCK, COLUMNS, HND_APART, NHD_APART, NHD_PAIRED, Cache, Shape, cache
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from kvpush.core.layout import Blocks, Layout, Span
from kvpush.core.planner import Plan, plan

BLOCKS = 24
SHAPE = Shape(num_blocks=BLOCKS)


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a transfer: its cache and the block ids for the tokens from `start` on."""

    cache: Cache
    ids: tuple[int, ...]
    start: int

    @property
    def layout(self) -> Layout:
        return self.cache.layout

    @property
    def block_size(self) -> int:
        return self.layout.groups[0].block_size

    def place(self, token: int) -> tuple[int, int]:
        """Block id and position in it."""
        return self.ids[token // self.block_size - self.start // self.block_size], token % self.block_size


def make_plan(span: Span, mine: Side, theirs: Side) -> Plan:
    return plan(span, mine.layout, (mine.ids,), mine.start, theirs.layout, (theirs.ids,), theirs.start)


def carry_out(made: Plan, mine: Cache, theirs: Cache) -> NDArray[np.int64]:
    """Copy; returns how often each byte of `theirs` was written."""
    written = np.zeros(theirs.memory.size, np.int64)
    for local, remote, nbytes in zip(made.local, made.remote, made.nbytes, strict=True):
        source, target = int(local) - mine.memory.ctypes.data, int(remote) - theirs.memory.ctypes.data
        assert 0 <= source <= source + nbytes <= mine.memory.size
        assert 0 <= target <= target + nbytes <= theirs.memory.size
        theirs.memory[target : target + nbytes] = mine.memory[source : source + nbytes]
        written[target : target + nbytes] += 1
    return written


def plain_copy(tokens: range, mine: Side, theirs: Side) -> NDArray[np.uint8]:
    """What `theirs` must hold after `tokens` have been copied."""
    expected = theirs.cache.memory.copy()
    shared = range(max(s.layout.head_start for s in (mine, theirs)), min(s.layout.head_end for s in (mine, theirs)))
    for token in tokens:
        for head in shared:
            places = zip(
                mine.cache.where(*mine.place(token), head), theirs.cache.where(*theirs.place(token), head), strict=True
            )
            for source, target in places:
                expected[target] = mine.cache.memory[source]
    return expected


def in_same_order(mine: Layout, theirs: Layout) -> bool:
    """Whether whole blocks of the two are the same bytes in the same order."""
    inner = [
        [(p.layer, p.kind, p.head_stride, p.token_stride, p.lanes, p.lane_stride) for p in side.planes]
        for side in (mine, theirs)
    ]
    return inner[0] == inner[1] and mine.groups[0].block_size == theirs.groups[0].block_size


def copied(span: Span, mine: Side, theirs: Side) -> range:
    """The tokens that a plan for `span` may and must copy."""
    size = mine.block_size
    return range(span.start, -(-span.end // size) * size if in_same_order(mine.layout, theirs.layout) else span.end)


def assert_minimal(made: Plan, mine: Side, theirs: Side) -> None:
    """No two descriptors could be one, but for runs that would cross from one region into another."""
    seams = [{region.base for region in side.layout.regions} for side in (mine, theirs)]
    begins = set(zip(made.local.tolist(), made.remote.tolist(), strict=True))
    ends = zip((made.local + made.nbytes).tolist(), (made.remote + made.nbytes).tolist(), strict=True)
    assert not [pair for pair in ends if pair in begins and pair[0] not in seams[0] and pair[1] not in seams[1]]


def assert_within_regions(starts: NDArray[np.int64], nbytes: NDArray[np.int64], layout: Layout) -> None:
    areas = [(region.base, region.base + region.nbytes) for region in layout.regions]
    for start, end in zip(starts.tolist(), (starts + nbytes).tolist(), strict=True):
        assert any(low <= start < end <= high for low, high in areas)


@st.composite
def caches(draw: st.DrawFn, shape: Shape, seed: int) -> Cache:
    """A cache with this much in it, arranged in any way."""
    order = tuple(draw(st.permutations(AXES)))
    outermost = {"layer": shape.layers, "kind": 2}.get(order[0], 1)
    start = draw(st.integers(0, shape.total_heads - 1))
    arranged = replace(
        shape,
        order=order,
        lanes=draw(st.sampled_from([1, 1, 2, shape.head_bytes])),
        head_start=start,
        head_end=draw(st.integers(start + 1, shape.total_heads)),
        num_blocks=draw(st.integers(BLOCKS, BLOCKS + 3)),
        regions=draw(st.sampled_from([1, outermost])),
    )
    return cache(arranged, seed)


@st.composite
def sides(draw: st.DrawFn, made: Cache, span: Span, starts: st.SearchStrategy[int]) -> Side:
    """Shuffled blocks for the span, some of which may lie before and after it."""
    start = draw(starts)
    size, num_blocks = made.layout.groups[0].block_size, made.layout.groups[0].num_blocks
    needed = -(-span.end // size) - start // size
    ids = draw(st.permutations(range(num_blocks)))[: needed + draw(st.integers(0, 2))]
    return Side(made, tuple(draw(st.sampled_from([ids, sorted(ids)]))), start)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Span, Side, Side]:
    """A span and two sides with layouts that have nothing in common but the model."""
    sizes = draw(st.sampled_from([(4, 4), (1, 1), (2, 4), (4, 2), (1, 8), (8, 1)]))
    shape = Shape(layers=draw(st.integers(1, 3)), head_bytes=4, total_heads=draw(st.integers(1, 3)))
    mine, theirs = (draw(caches(replace(shape, block_size=size), seed)) for seed, size in enumerate(sizes))
    if sizes[0] == sizes[1] and draw(st.booleans()):
        theirs = cache_like(mine)
    start = draw(st.integers(0, 2 * lcm(*sizes)))
    span = Span(start, start + draw(st.integers(1, (BLOCKS - 2) * min(sizes) - start)))
    return (
        span,
        draw(sides(mine, span, st.integers(0, span.start))),
        draw(sides(theirs, span, st.just(span.start))),
    )


def cache_like(other: Cache) -> Cache:
    """Another cache of the same arrangement."""
    memory = np.random.default_rng(99).integers(0, 256, other.memory.size, np.uint8)
    shift = memory.ctypes.data - other.memory.ctypes.data
    layout = other.layout
    planes = tuple(structs.replace(plane, base=plane.base + shift) for plane in layout.planes)
    regions = tuple(structs.replace(region, base=region.base + shift) for region in layout.regions)
    return Cache(structs.replace(layout, planes=planes, regions=regions), memory)


@settings(max_examples=400, deadline=None)
@given(transfers())
def test_plan_copies_the_span_and_nothing_else(transfer: tuple[Span, Side, Side]) -> None:
    span, mine, theirs = transfer
    tokens = copied(span, mine, theirs)
    event(f"in same order: {in_same_order(mine.layout, theirs.layout)}")
    expected = plain_copy(tokens, mine, theirs)
    made = make_plan(span, mine, theirs)
    written = carry_out(made, mine.cache, theirs.cache)
    assert np.array_equal(theirs.cache.memory, expected)
    assert written.max() <= 1
    shared = min(s.layout.head_end for s in (mine, theirs)) - max(s.layout.head_start for s in (mine, theirs))
    assert written.sum() == len(tokens) * max(0, shared) * 4 * len(mine.layout.planes) == made.total_bytes
    assert_minimal(made, mine, theirs)
    assert_within_regions(made.local, made.nbytes, mine.layout)
    assert_within_regions(made.remote, made.nbytes, theirs.layout)
    assert (np.diff(made.local) > 0).all()


def side(shape: Shape, ids: range | list[int], start: int = 0, seed: int = 0) -> Side:
    return Side(cache(shape, seed), tuple(ids), start)


@pytest.mark.parametrize(
    ("order", "descriptors"), [(NHD_APART, 4), (HND_APART, 4), (NHD_PAIRED, 2), (BY_BLOCK, 1), (COLUMNS, 4)]
)
def test_blocks_in_a_row_on_both_sides_take_one_run_per_area(order: tuple[str, ...], descriptors: int) -> None:
    shape = replace(SHAPE, order=order, lanes=1 if order != COLUMNS else 8)
    made = make_plan(Span(0, 40), side(shape, range(3, 13)), side(shape, range(7, 17)))
    assert made.descriptors == descriptors
    assert made.total_bytes == 10 * 4 * 4 * 8 * 4


def test_blocks_in_reverse_order_on_both_sides_are_merged_too() -> None:
    made = make_plan(Span(0, 40), side(SHAPE, range(12, 2, -1)), side(SHAPE, range(16, 6, -1)))
    assert made.descriptors == 4


def test_scattered_blocks_take_one_run_per_block_and_plane() -> None:
    made = make_plan(Span(0, 16), side(SHAPE, [1, 3, 5, 7]), side(SHAPE, [8, 6, 4, 2]))
    assert made.descriptors == 4 * 4
    assert set(made.nbytes.tolist()) == {4 * 4 * 8}


@pytest.mark.parametrize("order", [NHD_APART, HND_APART])
def test_last_block_is_copied_to_its_end_between_equals(order: tuple[str, ...]) -> None:
    shape = replace(SHAPE, order=order)
    made = make_plan(Span(0, 5), side(shape, [1, 3]), side(shape, [2, 5]))
    assert set(made.nbytes.tolist()) == {4 * 4 * 8}


def test_nothing_before_the_span_is_written() -> None:
    shape = replace(SHAPE, order=HND_APART)
    mine, theirs = side(shape, [1, 3]), side(shape, [2, 5], start=3)
    before = plain_copy(range(3, 8), mine, theirs)
    carry_out(make_plan(Span(3, 8), mine, theirs), mine.cache, theirs.cache)
    assert np.array_equal(theirs.cache.memory, before)


def test_unequal_block_sizes_take_runs_of_the_smaller_one() -> None:
    small, large = replace(SHAPE, block_size=4), replace(SHAPE, block_size=16, num_blocks=6)
    made = make_plan(Span(0, 32), side(small, [9, 1, 7, 3, 5, 11, 13, 15]), side(large, [4, 2]))
    assert made.descriptors == 8 * 4
    assert set(made.nbytes.tolist()) == {4 * 4 * 8}


def test_other_head_order_takes_a_run_per_head_of_a_token() -> None:
    made = make_plan(Span(0, 4), side(SHAPE, [1]), side(replace(SHAPE, order=HND_APART), [2]))
    assert set(made.nbytes.tolist()) == {8}
    assert made.descriptors == 4 * 4 * 4


def test_empty_span_takes_nothing() -> None:
    made = make_plan(Span(5, 5), side(SHAPE, [1, 2]), side(SHAPE, [1, 2]))
    assert (made.descriptors, made.total_bytes) == (0, 0)


def test_ranks_that_share_no_head_copy_nothing() -> None:
    lower, upper = replace(SHAPE, head_end=2), replace(SHAPE, head_start=2)
    assert make_plan(Span(0, 4), side(lower, [1]), side(upper, [1])).descriptors == 0


def test_packed_blocks_are_copied_whole() -> None:
    shape = replace(SHAPE, packing="amx")
    made = make_plan(Span(4, 9), side(shape, [1, 3, 5]), side(shape, [2, 4], start=4))
    assert set(made.nbytes.tolist()) == {4 * 4 * 8}
    with pytest.raises(ValueError, match="only be copied whole"):
        make_plan(Span(3, 9), side(shape, [1, 3, 5]), side(shape, [2, 4, 6], start=3))


def test_empty_block_list_for_a_span_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks of 4"):
        make_plan(Span(0, 4), side(SHAPE, []), side(SHAPE, [1]))


@pytest.mark.parametrize("ids", [[1], [1, 2], [0, 1, 2, 3, 4, 5]])
def test_block_list_that_ends_before_the_span_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="do not hold"):
        make_plan(Span(0, len(ids) * 4 + 1), side(SHAPE, ids), side(SHAPE, range(12)))


def test_block_list_that_begins_after_the_span_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold"):
        make_plan(Span(0, 8), side(SHAPE, range(4)), side(SHAPE, range(4), start=4))


@pytest.mark.parametrize("bad", [-1, BLOCKS])
def test_block_id_outside_of_the_layout_is_refused(bad: int) -> None:
    for mine, theirs in (([0, bad], [0, 1]), ([0, 1], [bad, 1])):
        with pytest.raises(ValueError, match=r"not in \[0, 24\)"):
            make_plan(Span(0, 8), side(SHAPE, mine), side(SHAPE, theirs))


def test_missing_group_is_refused() -> None:
    mine, theirs = side(SHAPE, [0]), side(SHAPE, [0])
    nothing: Blocks = ()
    with pytest.raises(ValueError, match="group 0"):
        plan(Span(0, 4), mine.layout, nothing, 0, theirs.layout, (theirs.ids,), 0)


@pytest.mark.parametrize("span", [Span(4, 3), Span(-4, 3)])
def test_impossible_span_is_refused(span: Span) -> None:
    with pytest.raises(ValueError, match="no span"):
        make_plan(span, side(SHAPE, [0]), side(SHAPE, [0]))


def test_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="different layers"):
        make_plan(Span(0, 4), side(SHAPE, [0]), side(replace(SHAPE, layers=3), [0]))


def test_block_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 and 6"):
        make_plan(Span(0, 4), side(SHAPE, [0]), side(replace(SHAPE, block_size=6), [0]))


def test_runs_end_where_a_region_ends() -> None:
    """A transport registers regions one by one: what crosses a seam is in neither."""
    whole = replace(SHAPE, order=NHD_APART)
    for mine, theirs in ((1, 1), (2, 1), (1, 2), (2, 2)):
        made = make_plan(
            Span(0, 4 * BLOCKS),
            side(replace(whole, regions=mine), range(BLOCKS)),
            side(replace(whole, regions=theirs), range(BLOCKS)),
        )
        assert made.descriptors == max(mine, theirs)
