"""A device that works asynchronously: steps are launched at once and happen in order, each taking its modelled time.

`Stream` owns one thread, which plays the device: it writes KV and samples tokens when a step's modelled time has
come. The thread that launches (the engine's worker) only ever waits in `Step.tokens`. `Event` is what a GPU event is:
recorded on the stream by the launching thread, waited for by any.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvpush.sim.kvfunc import Words

_WRITE_CHUNK = 256
"""Tokens written at a time; numpy lets other threads run while it copies."""


class TokenStore:
    """The tokens of one sequence in device memory: the prompt, then what was sampled."""

    def __init__(self, tokens: Words) -> None:
        self._tokens = tokens.copy()
        self._used = len(tokens)

    def __len__(self) -> int:
        return self._used

    def between(self, start: int, end: int) -> Words:
        """Tokens at positions [start, end)."""
        return self._tokens[start : min(end, self._used)]

    def append(self, token: int) -> None:
        """Add a sampled token."""
        if self._used == len(self._tokens):
            self._tokens.resize(2 * self._used + 64, refcheck=False)
        self._tokens[self._used] = token
        self._used += 1


@dataclass(frozen=True)
class Row:
    """One request's part in a step: compute positions [`start`, `end`) into `blocks`, then sample or not.

    `loaded`: KV at positions [0, loaded) was not computed by this request on this device (prefix cache or
    connector), and has not been looked at yet.
    """

    request_id: str
    tokens: TokenStore
    blocks: Words
    start: int
    end: int
    samples: bool
    loaded: int = 0


class Model(Protocol):
    """What runs on the device."""

    def write(self, row: Row, first: int, last: int) -> None:
        """Write KV of positions [first, last) of a row."""

    def sample(self, rows: list[Row]) -> list[int]:
        """The next token of each row."""


@dataclass
class Step:
    """One launched forward pass; times are monotonic seconds."""

    rows: list[Row]
    launched_at: float
    start: float
    end: float
    _sampled: dict[str, int] = field(default_factory=dict)
    _error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def tokens(self) -> dict[str, int]:
        """Wait until the device has finished the step; the sampled token per request id."""
        self._done.wait()
        if self._error is not None:
            raise RuntimeError("the simulated device failed") from self._error
        return self._sampled

    @property
    def done(self) -> bool:
        """Whether the device has finished the step."""
        return self._done.is_set()


class Event:
    """Fires when everything launched on the stream before it was recorded has happened."""

    def __init__(self, step: Step | None) -> None:
        self._step = step

    def query(self) -> bool:
        """Whether it has fired."""
        return self._step is None or self._step.done

    def synchronize(self) -> None:
        """Wait until it has fired."""
        if self._step is not None:
            self._step.tokens()


class Stream:
    """The device's only queue."""

    def __init__(self, model: Model, finished: Callable[[Step], None] = lambda step: None) -> None:
        """`finished` is called on the device's thread after each step."""
        self._model = model
        self._finished = finished
        self._steps: deque[Step] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._last: Step | None = None
        self._write_s = 2e-6  # seconds per token written, measured as we go
        self._thread = threading.Thread(target=self._run, name="sim-device", daemon=True)
        self._thread.start()

    def launch(self, rows: list[Row], cost_s: float) -> Step:
        """Queue a forward pass of `cost_s` seconds and return at once."""
        now = time.monotonic()
        start = max(now, self._last.end) if self._last else now
        step = Step(rows, now, start, start + cost_s)
        self._last = step
        with self._wake:
            self._steps.append(step)
            self._wake.notify()
        return step

    def record_event(self) -> Event:
        """An event after everything launched so far."""
        return Event(self._last)

    def close(self) -> None:
        """Finish what was launched, then end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while (step := self._next()) is not None:
            try:
                self._execute(step)
            except BaseException as error:
                step._error = error
            step._done.set()
            self._finished(step)

    def _next(self) -> Step | None:
        with self._wake:
            while not self._steps and not self._closed:
                self._wake.wait()
            return self._steps.popleft() if self._steps else None

    def _execute(self, step: Step) -> None:
        tokens = sum(row.end - row.start for row in step.rows)
        # the bytes must be there when the step ends, and as little as possible before
        _sleep_until(step.end - tokens * self._write_s)
        before = time.monotonic()
        for row in step.rows:
            for first in range(row.start, row.end, _WRITE_CHUNK):
                self._model.write(row, first, min(first + _WRITE_CHUNK, row.end))
        if tokens > _WRITE_CHUNK:
            self._write_s = 0.5 * self._write_s + 0.5 * (time.monotonic() - before) / tokens
        _sleep_until(step.end)
        sampling = [row for row in step.rows if row.samples]
        for row, token in zip(sampling, self._model.sample(sampling), strict=True):
            row.tokens.append(token)
            step._sampled[row.request_id] = token


def _sleep_until(deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left)


_current: Stream | None = None


def set_current_stream(stream: Stream) -> None:
    """Make `stream` this process's device."""
    global _current
    _current = stream


def current_stream() -> Stream | None:
    """This process's simulated device; None where the device is real."""
    return _current
