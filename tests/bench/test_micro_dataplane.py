"""The small measurements of planner and NIXL measure what they say."""

import pytest

from kvpush.bench.micro_dataplane import ARRANGEMENTS, WAYS, moved, planned
from kvpush.core.mode import Mode


def test_planner_is_measured_at_twenty_thousand_descriptors() -> None:
    descriptors, times = planned(*ARRANGEMENTS["equal"], repeats=2)
    assert descriptors > 20_000
    assert len(times) == 2


@pytest.mark.parametrize("name", ["unequal_blocks", "other_head_order"])
def test_awkward_pairs_take_at_least_as_many_descriptors(name: str) -> None:
    assert planned(*ARRANGEMENTS[name], repeats=1)[0] > 20_000


@pytest.mark.parametrize("way", list(WAYS))
def test_writes_and_reads_of_each_size_are_measured(way: str) -> None:
    pytest.importorskip("nixl")
    rows = moved(way, counts=(3, 70), repeats=1)
    push, pull = Mode
    assert [(row.descriptors, row.mode) for row in rows] == [(3, push), (3, pull), (70, push), (70, pull)]
    assert all(row.post_s > 0 and row.wire_s > 0 for row in rows)
