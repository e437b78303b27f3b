"""So that what goes wrong a thousand times does not fill the log with a thousand lines."""

from dataclasses import dataclass


class Bucket:
    """A token bucket: full at `now`, and filled with `per_s` a second."""

    def __init__(self, size: float, per_s: float, now: float) -> None:
        self._size, self._per_s = size, per_s
        self._tokens, self._filled_at = size, now

    def take(self, cost: float, now: float) -> bool:
        """Take `cost` at `now` (seconds), if there is as much; else nothing."""
        self._tokens = min(self._size, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._tokens < cost:
            return False
        self._tokens -= cost
        return True


@dataclass
class _Kind:
    bucket: Bucket
    suppressed: int = 0


class RateLimit:
    """Lets `burst` lines of a kind through, then `per_s`. Kinds must be few; each is remembered."""

    def __init__(self, burst: int = 10, per_s: float = 0.2) -> None:
        self._burst = burst
        self._per_s = per_s
        self._kinds: dict[str, _Kind] = {}

    def allows(self, kind: str, now: float) -> bool:
        """Whether a line of `kind` may be written at `now` (seconds)."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _Kind(Bucket(self._burst, self._per_s, now))
        if known.bucket.take(1, now):
            return True
        known.suppressed += 1
        return False

    def take_suppressed(self, kind: str) -> int:
        """How many lines of `kind` were held back since the last call."""
        known = self._kinds.get(kind)
        if known is None:
            return 0
        suppressed, known.suppressed = known.suppressed, 0
        return suppressed
