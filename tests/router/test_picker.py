"""Scores: which engine gets the next leg, with records made by hand."""

import heapq
import random
from collections import Counter
from typing import Any

import pytest

from kvpush.router.asked import Asked
from kvpush.router.body import Route
from kvpush.router.config import EngineRole, EngineSpec
from kvpush.router.engine import Engine, Seat
from kvpush.router.picker import pick, score
from kvpush.router.scrape import Sample


def sample(**values: Any) -> Sample:
    nothing = dict.fromkeys(Sample.__dataclass_fields__)
    return Sample(**(nothing | values))


def engine(name: str, role: EngineRole, **values: Any) -> Engine:
    made = Engine(EngineSpec(url=name), role)
    made.polled(sample(**values))
    return made


def asked(tokens: int, prefix: tuple[int, ...] = (), sub_requests: int = 1) -> Asked:
    return Asked(
        route=Route.COMPLETIONS,
        fields={},
        stream=False,
        sub_requests=sub_requests,
        tokens=tokens,
        prefix=prefix,
        must_be_local=None,
    )


def picked(engines: list[Engine], request: Asked) -> str:
    chosen = pick(engines, request, random.Random(1))
    assert chosen is not None
    return chosen.url


def test_nothing_is_picked_from_nothing() -> None:
    assert pick([], asked(1), random.Random(1)) is None


def test_prefill_goes_to_the_fewest_queued_tokens_not_requests() -> None:
    many_short, one_long = (engine(name, EngineRole.PREFILL) for name in ("many", "long"))
    for _ in range(5):
        many_short.admit(asked(10))
    one_long.admit(asked(1000))
    assert picked([many_short, one_long], asked(100)) == "many"


def test_known_prefix_wins_while_it_saves_more_than_the_queue_costs() -> None:
    warm, cold = (engine(name, EngineRole.PREFILL) for name in ("warm", "cold"))
    prefix = tuple(range(10))
    warm.prefixes.add(prefix)
    warm.admit(asked(500))
    assert picked([warm, cold], asked(1000, prefix)) == "warm"
    warm.admit(asked(600))
    assert picked([warm, cold], asked(1000, prefix)) == "cold"


def test_decode_goes_to_the_fewest_requests_counting_each_choice() -> None:
    lists, single = (engine(name, EngineRole.DECODE) for name in ("lists", "single"))
    lists.admit(asked(10, sub_requests=4))
    single.admit(asked(1000))
    single.admit(asked(1000))
    assert picked([lists, single], asked(10)) == "single"


def test_decode_avoids_a_pool_that_will_be_full_when_everything_promised_has_come() -> None:
    pool = {"kv_usage": 0.5, "total_blocks": 100, "block_size": 10}
    promised, busy = (engine(name, EngineRole.DECODE, **pool) for name in ("promised", "busy"))
    promised.admit(asked(400))
    for _ in range(3):
        busy.admit(asked(1)).written()
    assert picked([promised, busy], asked(100)) == "busy"


def test_conversation_sticks_to_its_decode_engine_but_not_at_any_price() -> None:
    home, other = (engine(name, EngineRole.DECODE) for name in ("home", "other"))
    prefix = (1, 2, 3)
    home.prefixes.add(prefix)
    home.admit(asked(1))
    assert picked([home, other], asked(10, prefix)) == "home"
    home.admit(asked(1))
    assert picked([home, other], asked(10, prefix)) == "other"


def test_other_routers_requests_count_and_our_own_are_not_counted_twice() -> None:
    ours, foreign = (engine(name, EngineRole.DECODE) for name in ("ours", "foreign"))
    ours.admit(asked(1))
    ours.polled(sample(running=1.0, waiting=0.0))
    foreign.polled(sample(running=2.0, waiting=1.0))
    assert score(ours, asked(1))[0] == pytest.approx(1.0)
    assert score(foreign, asked(1))[0] == pytest.approx(3.0)


def test_seats_given_back_leave_no_load() -> None:
    one = engine("one", EngineRole.DECODE)
    seats = [one.admit(asked(10, sub_requests=2)) for _ in range(3)]
    for seat in seats * 2:
        seat.release()
    assert (one.requests, one.tokens, one.unwritten_tokens) == (0, 0, 0)


def test_restarted_engine_starts_with_a_clean_record() -> None:
    one = engine("one", EngineRole.DECODE, started_at=1.0)
    one.prefixes.add((1,))
    one.breaker.failed(0.0)
    one.breaker.failed(0.0)
    one.breaker.failed(0.0)
    one.polled(sample(started_at=2.0))
    assert one.breaker.allows(0.0)
    assert len(one.prefixes) == 0


def simulate(service_s: list[float], rate_per_s: float, requests: int) -> tuple[list[int], int]:
    """Send at a fixed rate in virtual time: what each engine got, and how far apart in flight the fast ones were."""
    engines = [engine(str(number), EngineRole.DECODE) for number in range(len(service_s))]
    fast = [one for one, seconds in zip(engines, service_s, strict=True) if seconds == min(service_s)]
    rng, running, worst = random.Random(7), list[tuple[float, int, Seat]](), 0
    got = Counter[str]()
    for number in range(requests):
        now = number / rate_per_s
        while running and running[0][0] <= now:
            heapq.heappop(running)[2].release()
        chosen = pick(engines, asked(100), rng)
        assert chosen is not None
        got[chosen.url] += 1
        heapq.heappush(running, (now + service_s[int(chosen.url)], number, chosen.admit(asked(100))))
        worst = max(worst, max(one.requests for one in fast) - min(one.requests for one in fast))
    return [got[one.url] for one in engines], worst


@pytest.mark.parametrize("rate_per_s", [10.0, 40.0, 100.0, 200.0])
def test_slow_engine_gets_under_15_percent_and_equal_ones_differ_by_two_at_most(rate_per_s: float) -> None:
    got, worst = simulate([1.0, 0.1, 0.1, 0.1], rate_per_s, 1000)
    assert got[0] < 150
    assert worst <= 2


def test_two_choices_of_a_large_fleet_still_leave_the_slow_engine_out() -> None:
    got, worst = simulate([1.0] + [0.1] * 15, 100.0, 2000)
    assert got[0] < 0.5 * 2000 / 16
    assert worst <= 5
