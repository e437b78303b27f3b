"""So that what goes wrong a thousand times does not fill the log with a thousand lines."""

from dataclasses import dataclass


@dataclass
class _Bucket:
    tokens: float
    filled_at: float
    suppressed: int = 0


class RateLimit:
    """Lets `burst` lines of a kind through, then `per_s`. Kinds must be few; each is remembered."""

    def __init__(self, burst: int = 10, per_s: float = 0.2) -> None:
        self._burst = burst
        self._per_s = per_s
        self._buckets: dict[str, _Bucket] = {}

    def allows(self, kind: str, now: float) -> bool:
        """Whether a line of `kind` may be written at `now` (seconds)."""
        bucket = self._buckets.setdefault(kind, _Bucket(self._burst, now))
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.filled_at) * self._per_s)
        bucket.filled_at = now
        if bucket.tokens < 1:
            bucket.suppressed += 1
            return False
        bucket.tokens -= 1
        return True

    def take_suppressed(self, kind: str) -> int:
        """How many lines of `kind` were held back since the last call."""
        bucket = self._buckets.get(kind)
        if bucket is None:
            return 0
        suppressed, bucket.suppressed = bucket.suppressed, 0
        return suppressed
