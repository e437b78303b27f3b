import itertools
from pathlib import Path

import pytest

from kvpush.bench.soak import SoakOptions, SoakReport, soak
from kvpush.bench.soak_traffic import Clients, Mix, Wish
from kvpush.cli.models import ensure_model
from kvpush.core.errors import ConfigError


def _wishes(count: int, mix: Mix, seed: int = 1) -> list[Wish]:
    clients = Clients(mix, seed)
    return [clients.wish() for _ in range(count)]


def test_clients_wish_the_same_for_the_same_seed() -> None:
    assert _wishes(50, Mix()) == _wishes(50, Mix())
    assert _wishes(50, Mix()) != _wishes(50, Mix(), seed=2)


def test_clients_leave_and_share_beginnings_as_often_as_the_mix_says() -> None:
    wishes = _wishes(4000, Mix(aborted=0.1, shared_prefix=0.25))

    leaving = sum(wish.leaves_after_s is not None for wish in wishes)
    beginnings = [wish.prompt[:160] for wish in wishes if len(wish.prompt) > 160]
    assert 300 < leaving < 500
    assert 800 < sum(beginnings.count(each) for each in {*beginnings} if beginnings.count(each) > 1) < 1200
    assert all(1 <= len(wish.prompt) <= 160 + 900 for wish in wishes)


@pytest.mark.parametrize(
    "bad", [{"wrong": 1}, {"stuck": 1}, {"leaked_blocks": 3}, {"died": ["prefill-0 (status 1)"]}, {"right": 0}]
)
def test_soak_fails_for_each_thing_that_must_not_happen(bad: dict[str, object]) -> None:
    fine: dict[str, object] = {
        "requests": 9,
        "right": 5,
        "aborted": 2,
        "failed": 1,
        "cut": 1,
        "recomputed": 2,
        "killed": 4,
    }

    assert SoakReport(**fine).passed  # type: ignore[arg-type]
    assert not SoakReport(**{**fine, **bad}).passed  # type: ignore[arg-type]


def test_soak_refuses_to_last_no_time() -> None:
    with pytest.raises(ConfigError, match="minutes: 0 is not greater"):
        SoakOptions(model="tiny", logs=Path("unused"), minutes=0)


@pytest.mark.engine
@pytest.mark.long
def test_short_soak_with_kills_ends_without_anything_wrong(tmp_path: Path) -> None:
    lines: list[str] = []
    options = SoakOptions(model=str(ensure_model("tiny")), logs=tmp_path, minutes=1.0, kill_s=10.0)

    report = soak(options, lines.append)

    assert report.passed, "\n".join(lines)
    assert report.killed >= 2
    ends = (report.right, report.aborted, report.failed, report.cut)
    assert report.requests == sum(ends), "each request has one end"
    assert sum(itertools.chain(report.transfers.values())) > report.right
