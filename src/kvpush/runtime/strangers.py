"""How much is listened to those whom the endpoint does not know: so little that those whom it knows do not notice.

Anybody is unknown until the endpoint has taken a hello from there, so a stranger has to be heard, but not for long
(a hello, and its repetitions), not in every turn, and not by many at once.
"""

TRIAL_FRAMES = 16
"""After so many a link is closed on which the endpoint has not come to know anybody."""

FRAMES_PER_TURN = 16
"""Of all strangers; the next turn goes on where this one has stopped."""

_LEAST_BYTES = 16 << 10
"""What a frame counts at least: reading, refusing and answering one costs as much as some KiB of it."""

_BURST_BYTES = 16 << 20
_BYTES_PER_S = 4 << 20
"""Some hundred small frames a second, which take a few percent of a core; a fleet that starts at once is some hundred
hellos of 40 KB."""


class Allowance:
    """A bucket of bytes that fills with time."""

    def __init__(self, now: float) -> None:
        self._bytes = float(_BURST_BYTES)
        self._filled_at = now

    def admits(self, nbytes: int, now: float) -> bool:
        """Whether a frame of `nbytes` may be looked into at `now` (seconds). Nothing is taken for one that may not."""
        self._bytes = min(_BURST_BYTES, self._bytes + (now - self._filled_at) * _BYTES_PER_S)
        self._filled_at = now
        cost = max(nbytes, _LEAST_BYTES)
        if self._bytes < cost:
            return False
        self._bytes -= cost
        return True
