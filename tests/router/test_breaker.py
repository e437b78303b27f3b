"""The circuit breaker's table, in virtual time."""

from kvpush.router.breaker import FAULTS, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, BreakerState


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAULTS):
        breaker.failed(now)
    return breaker


def test_breaker_opens_after_faults_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(FAULTS - 1):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.0)


def test_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker()
    for _ in range(10 * FAULTS):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_breaker_lets_one_leg_through_after_the_pause() -> None:
    breaker = opened()
    assert breaker.allows(FIRST_PAUSE_S)
    breaker.sent(FIRST_PAUSE_S)
    assert breaker.state is BreakerState.TRYING
    assert not breaker.allows(FIRST_PAUSE_S)


def test_good_try_closes_and_bad_try_doubles_the_pause() -> None:
    breaker = opened()
    breaker.sent(FIRST_PAUSE_S)
    breaker.failed(FIRST_PAUSE_S)
    assert not breaker.allows(2.9 * FIRST_PAUSE_S)
    assert breaker.allows(3 * FIRST_PAUSE_S)
    breaker.sent(3 * FIRST_PAUSE_S)
    breaker.succeeded()
    assert breaker.allows(3 * FIRST_PAUSE_S)


def test_pause_is_bounded_and_a_silent_try_does_not_block_for_ever() -> None:
    breaker, now = opened(), 0.0
    for _ in range(20):
        now += LONGEST_PAUSE_S
        breaker.sent(now)
        breaker.failed(now)
    assert breaker.allows(now + LONGEST_PAUSE_S)
    breaker.sent(now + LONGEST_PAUSE_S)
    assert breaker.allows(now + 2 * LONGEST_PAUSE_S)
