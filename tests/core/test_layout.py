"""Comparing two layouts, and checking what a peer says of its own."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from core.strided import COLUMNS, HND_APART, NHD_PAIRED, Shape, cache
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from kvpush.core.errors import Reason, RemoteProtocolError
from kvpush.core.layout import (
    Blocks,
    Difference,
    Group,
    Kind,
    Layout,
    Plane,
    Region,
    Span,
    check_blocks,
    check_layout,
    first_difference,
)

SHAPE = Shape(layers=2, block_size=4, num_blocks=8)
LAYOUT = cache(SHAPE).layout

Change = Callable[[Layout], Layout]


def with_plane(layout: Layout, **fields: object) -> Layout:
    """The layout with its first plane changed."""
    return changed(layout, planes=(changed(layout.planes[0], **fields), *layout.planes[1:]))


def with_layer(layout: Layout, name: str) -> Layout:
    """The layout with one more layer."""
    more = tuple(changed(plane, layer=name) for plane in layout.planes[:2])
    return changed(layout, planes=(*layout.planes, *more))


# two layouts --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [HND_APART, NHD_PAIRED, COLUMNS])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 32])
def test_same_model_in_another_arrangement_is_compatible(order: tuple[str, ...], block_size: int) -> None:
    lanes = 8 if order == COLUMNS else 1
    theirs = cache(replace(SHAPE, order=order, lanes=lanes, block_size=block_size, num_blocks=5)).layout
    assert first_difference(LAYOUT, theirs) is None
    assert first_difference(theirs, LAYOUT) is None


DIFFERENCES: list[tuple[Change, str, str, str]] = [
    (lambda it: changed(it, model="other"), "model", "m", "other"),
    (lambda it: changed(it, dtype="fp8"), "dtype", "uint8", "fp8"),
    (lambda it: changed(it, head_bytes=16), "head_bytes", "8", "16"),
    (lambda it: changed(it, total_heads=8), "total_heads", "4", "8"),
    (lambda it: changed(it, memory="vram"), "memory", "dram", "vram"),
    (lambda it: changed(it, tp_size=2), "tp_size", "1", "2"),
    (lambda it: changed(it, head_start=2), "heads", "[0, 4)", "[2, 4)"),
    (lambda it: changed(it, groups=(*it.groups, Group(4, 8))), "groups", "1", "2"),
    (lambda it: changed(it, groups=(Group(6, 8),)), "groups[0].block_size", "4", "6"),
    (lambda it: with_plane(it, group=1), "group of layers.0 (k)", "0", "1"),
    (lambda it: with_plane(it, packing="amx"), "packing of layers.0 (k)", "by token", "amx"),
]


@pytest.mark.parametrize(("change", "field", "ours", "theirs"), DIFFERENCES, ids=[row[1] for row in DIFFERENCES])
def test_difference_names_the_field_and_both_values(change: Change, field: str, ours: str, theirs: str) -> None:
    found = first_difference(LAYOUT, change(LAYOUT))
    assert found is not None
    assert (found.field, found.ours, found.theirs) == (field, ours, theirs)
    turned = first_difference(change(LAYOUT), LAYOUT)
    assert turned is not None
    assert (turned.ours, turned.theirs) == (theirs, ours)


def test_first_of_several_differences_is_named() -> None:
    found = first_difference(LAYOUT, changed(LAYOUT, memory="vram", dtype="fp8", tp_size=4))
    assert found is not None
    assert found.field == "dtype"


def test_draft_layers_on_one_side_are_named_with_what_to_do() -> None:
    found = first_difference(with_layer(LAYOUT, "draft.0"), LAYOUT)
    assert found is not None
    assert found.field == "layers"
    assert found.ours == "2 that the other lacks: draft.0 (k), draft.0 (v)"
    assert found.theirs == "none that the other lacks"
    assert "speculative" in str(found)
    assert "draft.0" in str(found)


def test_many_missing_layers_are_not_all_named() -> None:
    theirs = LAYOUT
    for number in range(50):
        theirs = with_layer(theirs, f"mtp.{number}")
    found = first_difference(LAYOUT, theirs)
    assert found is not None
    assert found.theirs.startswith("100 that the other lacks: mtp.0 (k)")
    assert len(found.theirs) < 200


def test_packed_blocks_must_have_the_same_size() -> None:
    ours, theirs = (cache(replace(SHAPE, packing="amx", block_size=size)).layout for size in (4, 8))
    assert first_difference(ours, ours) is None
    found = first_difference(ours, theirs)
    assert found is not None
    assert found.field == "groups[0].block_size"
    assert "whole" in found.remedy


def test_difference_reads_as_a_sentence() -> None:
    assert str(Difference("dtype", "a", "b")) == "dtype: ours a, theirs b"
    assert str(Difference("dtype", "a", "b", "Use one.")) == "dtype: ours a, theirs b. Use one."


# registrations ------------------------------------------------------------------------------------------
def refused(check: Callable[[], None]) -> RemoteProtocolError | None:
    """The refusal, if it is one."""
    try:
        check()
    except RemoteProtocolError as error:
        return error
    return None


def refusal(check: Callable[[], None]) -> RemoteProtocolError:
    """The refusal that must come."""
    error = refused(check)
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("span", "ids"),
    [
        (Span(0, 1), (7,)),
        (Span(0, 4), (0,)),
        (Span(0, 5), (3, 1)),
        (Span(3, 5), (3, 1)),
        (Span(4, 8), (5,)),
        (Span(1000, 1008), (5, 2)),
        (Span(0, 32), tuple(range(8))),
    ],
)
def test_registration_that_fits_its_span_is_taken(span: Span, ids: tuple[int, ...]) -> None:
    check_blocks(LAYOUT, span, (ids,))


@pytest.mark.parametrize("span", [Span(0, 0), Span(5, 5), Span(5, 4), Span(-1, 4), Span(-4, -1)])
def test_impossible_span_is_refused(span: Span) -> None:
    error = refusal(lambda: check_blocks(LAYOUT, span, ((0,),)))
    assert (error.reason, error.field) == (Reason.BAD_SPAN, "span")


@pytest.mark.parametrize(
    ("span", "blocks", "field", "words"),
    [
        (Span(0, 5), ((0,),), "blocks[0]", "1 ids, but [0, 5) takes 2 blocks of 4"),
        (Span(0, 4), ((0, 1),), "blocks[0]", "2 ids"),
        (Span(3, 5), ((0,),), "blocks[0]", "takes 2"),
        (Span(0, 4), ((),), "blocks[0]", "0 ids"),
        (Span(0, 4), (), "blocks", "0 lists"),
        (Span(0, 4), ((0,), (0,)), "blocks", "2 lists"),
        (Span(0, 8), ((0, 8),), "blocks[0]", "id 8 is not in [0, 8)"),
        (Span(0, 8), ((-1, 3),), "blocks[0]", "id -1"),
        (Span(0, 8), ((3, 3),), "blocks[0]", "twice"),
        (Span(0, 2**62), ((0,),), "blocks[0]", "1 ids"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(span: Span, blocks: Blocks, field: str, words: str) -> None:
    error = refusal(lambda: check_blocks(LAYOUT, span, blocks))
    assert (error.reason, error.field) == (Reason.BAD_BLOCK, field)
    assert words in error.detail


def test_second_group_is_checked_with_its_own_block_size() -> None:
    layout = changed(LAYOUT, groups=(Group(4, 8), Group(2, 8)))
    check_blocks(layout, Span(0, 8), ((0, 1), (0, 1, 2, 3)))
    error = refusal(lambda: check_blocks(layout, Span(0, 8), ((0, 1), (0, 1))))
    assert error.field == "blocks[1]"


@given(
    st.builds(Span, st.integers(-9, 40), st.integers(-9, 40)),
    st.lists(st.lists(st.integers(-2, 9), max_size=9).map(tuple), max_size=2).map(tuple),
)
def test_whatever_is_registered_is_taken_or_refused_by_name(span: Span, blocks: Blocks) -> None:
    caught = refused(lambda: check_blocks(LAYOUT, span, blocks))
    if caught is not None:
        assert caught.field
    else:
        (ids,) = blocks
        tokens = range(span.start, span.end)
        assert len({token // 4 for token in tokens}) == len(ids) == len(set(ids)) > 0
        assert set(ids) <= set(range(8))


# layouts from the wire ----------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [HND_APART, NHD_PAIRED, COLUMNS])
@pytest.mark.parametrize("regions", [1, 2])
def test_real_layouts_make_sense(order: tuple[str, ...], regions: int) -> None:
    check_layout(cache(replace(SHAPE, order=order, regions=regions, lanes=8 if order == COLUMNS else 1)).layout)


def test_one_block_layout_makes_sense_whatever_its_block_stride() -> None:
    layout = cache(replace(SHAPE, num_blocks=1)).layout
    check_layout(changed(layout, planes=tuple(changed(plane, block_stride=0) for plane in layout.planes)))


END = LAYOUT.regions[0].base + LAYOUT.regions[0].nbytes

NONSENSE: list[tuple[str, Change]] = [
    ("head_bytes", lambda it: changed(it, head_bytes=0)),
    ("head_bytes", lambda it: changed(it, head_bytes=1 << 40)),
    ("total_heads", lambda it: changed(it, total_heads=0)),
    ("head_start", lambda it: changed(it, head_start=-1)),
    ("head_end", lambda it: changed(it, head_end=5)),
    ("head_end", lambda it: changed(it, head_end=0)),
    ("tp_size", lambda it: changed(it, tp_size=0)),
    ("tp_rank", lambda it: changed(it, tp_rank=1)),
    ("tp_rank", lambda it: changed(it, tp_rank=-1)),
    ("memory", lambda it: changed(it, memory="tape")),
    ("groups", lambda it: changed(it, groups=())),
    ("planes", lambda it: changed(it, planes=())),
    ("regions", lambda it: changed(it, regions=())),
    ("groups[0].block_size", lambda it: changed(it, groups=(Group(0, 8),))),
    ("groups[0].num_blocks", lambda it: changed(it, groups=(Group(4, 1 << 40),))),
    ("regions[0]", lambda it: changed(it, regions=(Region(-8, 16),))),
    ("regions[0]", lambda it: changed(it, regions=(Region(8, 0),))),
    ("regions[0]", lambda it: changed(it, regions=(Region(1 << 62, 1),))),
    ("regions[0]", lambda it: changed(it, regions=(Region(8, 8, -1),))),
    ("regions", lambda it: changed(it, regions=(*it.regions, Region(it.regions[0].base + 8, 8)))),
    ("planes", lambda it: changed(it, planes=(*it.planes, it.planes[0]))),
    ("planes[0]", lambda it: with_plane(it, group=1)),
    ("planes[0]", lambda it: with_plane(it, group=-1)),
    ("planes[0]", lambda it: with_plane(it, base=it.planes[0].base - 1)),
    ("planes[0]", lambda it: with_plane(it, base=END - 8)),
    ("planes[0]", lambda it: with_plane(it, base=0)),
    ("planes[0]", lambda it: with_plane(it, token_stride=0)),
    ("planes[0]", lambda it: with_plane(it, token_stride=-32)),
    ("planes[0]", lambda it: with_plane(it, token_stride=16)),
    ("planes[0]", lambda it: with_plane(it, block_stride=64)),
    ("planes[0]", lambda it: with_plane(it, block_stride=1 << 63)),
    ("planes[0]", lambda it: with_plane(it, head_stride=1)),
    ("planes[0]", lambda it: with_plane(it, lanes=3, lane_stride=8)),
    ("planes[0]", lambda it: with_plane(it, lanes=0)),
    ("planes[0]", lambda it: with_plane(it, lanes=2, lane_stride=0)),
]


@pytest.mark.parametrize(("field", "change"), NONSENSE, ids=[f"{i}-{row[0]}" for i, row in enumerate(NONSENSE)])
def test_layout_that_makes_no_sense_is_refused_by_field(field: str, change: Change) -> None:
    error = refusal(lambda: check_layout(change(LAYOUT)))
    assert (error.reason, error.field) == (Reason.BAD_MESSAGE, f"layout.{field}")


@given(st.data())
def test_any_one_number_changed_never_raises_anything_else(data: st.DataObject) -> None:
    """What passes has every byte of every plane inside of a region."""
    number = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-2, 70))
    field = data.draw(
        st.sampled_from([name for name in Plane.__struct_fields__ if name not in ("layer", "kind", "packing")])
    )
    layout = with_plane(LAYOUT, **{field: data.draw(number)})
    caught = refused(lambda: check_layout(layout))
    if caught is not None:
        assert caught.reason is Reason.BAD_MESSAGE
        return
    plane, region = layout.planes[0], layout.regions[0]
    last = plane.base + 7 * plane.block_stride + 3 * plane.head_stride + 3 * plane.token_stride
    assert region.base <= plane.base <= last < region.base + region.nbytes


def test_layout_goes_over_the_wire_unchanged() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(LAYOUT), type=Layout)
    assert again == LAYOUT
    assert again.planes[0].kind is Kind.KEY
    check_layout(again)


def test_token_bytes_counts_all_planes_of_a_token() -> None:
    assert LAYOUT.token_bytes == 4 * 8 * 4
    assert Span(3, 10).tokens == 7
