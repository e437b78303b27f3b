from kvpush.runtime.ratelimit import RateLimit


def test_rate_limit_fills_up_again_with_time() -> None:
    limit = RateLimit(burst=2, per_s=1.0)
    assert [limit.allows("a", 0.0) for _ in range(3)] == [True, True, False]
    assert limit.allows("b", 0.0)
    assert [limit.allows("a", 1.0) for _ in range(2)] == [True, False]
    assert [limit.allows("a", 100.0) for _ in range(3)] == [True, True, False]
    assert limit.take_suppressed("a") == 3
    assert limit.take_suppressed("a") == limit.take_suppressed("never seen") == 0
