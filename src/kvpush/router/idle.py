"""A time-out for loops that wait thousands of times: one timer that looks at a time stamp, instead of one per wait."""

import asyncio
from types import TracebackType


class IdleTimeout:
    """Cancels the block when `allow` was not called for as long as it last said; the block then raises `TimeoutError`.

    It may be late by `tick_s`, which is also what is allowed at first.
    """

    def __init__(self, tick_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick_s = tick_s
        self._deadline = self._loop.time() + tick_s
        self._has_fired = False
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def allow(self, seconds: float) -> None:
        """Something has happened; the next thing may take `seconds`."""
        self._deadline = self._loop.time() + seconds

    def __enter__(self) -> "IdleTimeout":
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._tick_s, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._has_fired or self._task is None:
            return
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _look(self) -> None:
        left = self._deadline - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(min(left, self._tick_s), self._look)
        elif self._task is not None:
            self._has_fired = True
            self._task.cancel()
