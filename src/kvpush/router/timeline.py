"""When each stage of a request was reached: one log line per request is made of it."""

import time


class Timeline:
    """Stage names to milliseconds since the request arrived. A retry reaches its stages anew."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._at: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        """The stage is reached now."""
        self._at[stage] = time.monotonic()

    def milliseconds(self) -> dict[str, float]:
        """Each reached stage."""
        return {stage: round((at - self._start) * 1e3, 2) for stage, at in self._at.items()}

    def seconds_to(self, stage: str) -> float | None:
        """From the request's arrival to a stage; None when it was not reached."""
        at = self._at.get(stage)
        return None if at is None else at - self._start
