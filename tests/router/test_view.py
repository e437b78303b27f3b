"""What several processes know of one engine, as one."""

import msgspec
import pytest

from kvpush.router.breaker import BreakerState
from kvpush.router.config import EngineRole
from kvpush.router.engine import Duty
from kvpush.router.view import EngineView, joined

ONE = EngineView(
    role=EngineRole.DECODE,
    url="http://d:1",
    duty=Duty.ON,
    breaker=BreakerState.CLOSED,
    is_up=True,
    takes_legs=True,
    problem="",
    requests=3,
    tokens=100,
    unwritten_tokens=10,
    served=7,
    failed={"timeout": 1},
    lost_prompts=5.0,
    engine_id="d0",
    control="d:5600",
)


def but(**fields: object) -> EngineView:
    return msgspec.structs.replace(ONE, **fields)


def one_of(*views: EngineView) -> EngineView:
    (found,) = joined([view] for view in views)
    return found


def test_what_each_process_counts_itself_adds_up() -> None:
    found = one_of(ONE, but(requests=1, tokens=11, unwritten_tokens=0, served=2, failed={"timeout": 2, "broken": 4}))
    assert (found.requests, found.tokens, found.unwritten_tokens, found.served) == (4, 111, 10, 9)
    assert found.failed == {"timeout": 3, "broken": 4}


@pytest.mark.parametrize(("others", "latest"), [((9.0, 8.0), 9.0), ((None, 4.0), 5.0)])
def test_what_all_have_read_of_the_engine_is_counted_once(others: tuple[float | None, ...], latest: float) -> None:
    assert one_of(ONE, *(but(lost_prompts=count) for count in others)).lost_prompts == latest


def test_engine_that_counts_no_lost_prompts_has_none() -> None:
    assert one_of(but(lost_prompts=None), but(lost_prompts=None)).lost_prompts is None


def test_engine_is_up_and_takes_legs_only_where_all_say_so() -> None:
    lost = but(is_up=False, takes_legs=False, problem="refused", engine_id=None, control=None)
    for found in (one_of(ONE, lost), one_of(lost, ONE)):
        assert (found.is_up, found.takes_legs, found.problem) == (False, False, "refused")
        assert (found.engine_id, found.control) == ("d0", "d:5600")


@pytest.mark.parametrize(
    ("states", "worst"),
    [
        ((BreakerState.CLOSED, BreakerState.OPEN, BreakerState.TRYING), BreakerState.OPEN),
        ((BreakerState.TRYING, BreakerState.CLOSED), BreakerState.TRYING),
        ((BreakerState.CLOSED, BreakerState.CLOSED), BreakerState.CLOSED),
    ],
)
def test_worst_state_of_a_breaker_is_shown(states: tuple[BreakerState, ...], worst: BreakerState) -> None:
    assert one_of(*(but(breaker=state) for state in states)).breaker is worst


def test_engine_drains_when_any_says_so() -> None:
    assert one_of(ONE, but(duty=Duty.DRAINING)).duty is Duty.DRAINING


def test_engines_that_only_some_know_are_there_in_the_order_they_were_seen() -> None:
    prefill, other = but(role=EngineRole.PREFILL), but(url="http://d:2")
    assert joined([[prefill, ONE], [ONE, other]]) == [prefill, one_of(ONE, ONE), other]
