"""When each stage of a request was reached: one log line per request is made of it."""

import time


class Timeline:
    """Stage names to milliseconds since the request arrived. A stage counts when it is first reached."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._at: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        """The stage is reached now."""
        self._at.setdefault(stage, time.monotonic())

    def milliseconds(self) -> dict[str, float]:
        """Each reached stage, in the order reached."""
        return {stage: round((at - self._start) * 1e3, 2) for stage, at in self._at.items()}
