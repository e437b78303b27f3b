"""When faults happen."""

import pytest

from kvpush.core.errors import ConfigError
from kvpush.transport.faults import Fault, FaultKind, Faults, Point, Script, Seeded


def drawn(faults: Faults, point: Point, count: int) -> list[FaultKind | None]:
    return [fault.kind if (fault := faults.at(point)) else None for _ in range(count)]


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_kind_happens_at_its_own_point_only(kind: FaultKind) -> None:
    for point in Point:
        assert drawn(Script(Fault(kind)), point, 1) == [kind if point is kind.point else None]


def test_script_hits_the_occurrence_it_names() -> None:
    script = Script(Fault(FaultKind.POST_RAISES, nth=2), Fault(FaultKind.WRITE_LATE, nth=0))
    assert drawn(script, Point.WRITE, 4) == [FaultKind.WRITE_LATE, None, FaultKind.POST_RAISES, None]


def test_points_are_counted_apart() -> None:
    script = Script(Fault(FaultKind.NOTICE_LOST, nth=1))
    assert drawn(script, Point.WRITE, 3) == [None] * 3
    assert drawn(script, Point.NOTICE, 2) == [None, FaultKind.NOTICE_LOST]


def test_fault_without_an_occurrence_hits_each_one() -> None:
    assert drawn(Script(Fault(FaultKind.WRITE_TORN, nth=None)), Point.WRITE, 3) == [FaultKind.WRITE_TORN] * 3


RATES = {FaultKind.POST_RAISES: 0.2, FaultKind.WRITE_LATE: 0.3, FaultKind.NOTICE_LOST: 0.5}


def test_same_seed_gives_the_same_faults() -> None:
    one, two = (Seeded(5, RATES) for _ in range(2))
    points = [Point.WRITE, Point.NOTICE, Point.ADD_PEER] * 50
    assert [one.at(point) for point in points] == [two.at(point) for point in points]


def test_seeds_differ() -> None:
    assert drawn(Seeded(1, RATES), Point.WRITE, 50) != drawn(Seeded(2, RATES), Point.WRITE, 50)


def test_rates_are_kept() -> None:
    seen = drawn(Seeded(3, RATES), Point.WRITE, 10_000)
    assert 1700 < seen.count(FaultKind.POST_RAISES) < 2300
    assert 2700 < seen.count(FaultKind.WRITE_LATE) < 3300
    assert set(seen) == {None, FaultKind.POST_RAISES, FaultKind.WRITE_LATE}


def test_rates_of_one_point_leave_others_as_they_were() -> None:
    more = RATES | {FaultKind.ADD_PEER_FAILS: 0.9}
    one, two = Seeded(4, RATES), Seeded(4, more)
    points = [Point.ADD_PEER, Point.WRITE] * 50
    faults = [(one.at(point), two.at(point)) for point in points]
    assert all(a == b for (a, b), point in zip(faults, points, strict=True) if point is Point.WRITE)


@pytest.mark.parametrize(
    "rates", [{FaultKind.NOTICE_LOST: 1.1}, {FaultKind.NOTICE_LOST: -0.1}, dict.fromkeys(FaultKind, 0.4)]
)
def test_impossible_rates_are_refused(rates: dict[FaultKind, float]) -> None:
    with pytest.raises(ConfigError, match="rates"):
        Seeded(0, rates)
