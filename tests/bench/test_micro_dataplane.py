"""The small measurements of planner and NIXL measure what they say."""

import pytest

from kvpush.bench.micro_dataplane import ARRANGEMENTS, WAYS, planned, written


def test_planner_is_measured_at_twenty_thousand_descriptors() -> None:
    descriptors, times = planned(*ARRANGEMENTS["equal"], repeats=2)
    assert descriptors > 20_000
    assert len(times) == 2


@pytest.mark.parametrize("name", ["unequal_blocks", "other_head_order"])
def test_awkward_pairs_take_at_least_as_many_descriptors(name: str) -> None:
    assert planned(*ARRANGEMENTS[name], repeats=1)[0] > 20_000


@pytest.mark.parametrize("way", list(WAYS))
def test_writes_of_each_size_are_measured(way: str) -> None:
    pytest.importorskip("nixl")
    rows = written(way, counts=(3, 70), repeats=2)
    assert [row.descriptors for row in rows] == [3, 3, 70, 70]
    assert all(row.post_s > 0 and row.wire_s > 0 for row in rows)
