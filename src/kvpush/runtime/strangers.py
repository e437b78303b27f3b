"""How much is listened to those whom the endpoint does not know: so little that those whom it knows do not notice.

Anybody is unknown until the endpoint has taken a hello from there, so a stranger has to be heard, but not for long
(a hello, and its repetitions), not in every turn, and not by many at once.
"""

from kvpush.runtime.ratelimit import Bucket

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
    """So many bytes of all strangers are looked into."""

    def __init__(self, now: float) -> None:
        self._bucket = Bucket(_BURST_BYTES, _BYTES_PER_S, now)

    def admits(self, nbytes: int, now: float) -> bool:
        """Whether a frame of `nbytes` may be looked into at `now` (seconds). Nothing is taken for one that may not."""
        return self._bucket.take(max(nbytes, _LEAST_BYTES), now)
