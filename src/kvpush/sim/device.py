"""A device that works asynchronously: steps are launched at once and happen in order, each taking its modelled time.

`Stream` owns one thread, which plays the device: it writes KV and samples tokens when their modelled time has come.
The thread that launches (the engine's worker) only ever waits in `Step.tokens`. `Event` is what a GPU event is:
recorded on the stream by the launching thread, waited for by any. A long step is carried out in parts, a few layers
each, so that an event recorded between two layers fires between them.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvpush.sim.kvfunc import Words

_WRITE_CHUNK = 256
"""Tokens written at a time; numpy lets other threads run while it copies."""

_PARTS = 8
_LONG_S = 0.02
"""Steps at least this long are carried out in `_PARTS` parts; others, decode steps above all, in one."""


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

    `unchecked`: KV at these positions was not computed by this request on this device (prefix cache or connector),
    and is to be checked before this step samples, where checking is asked for.
    """

    request_id: str
    tokens: TokenStore
    blocks: Words
    start: int
    end: int
    samples: bool
    unchecked: range = range(0)


@dataclass(frozen=True)
class Part:
    """Part `index` of `parts` of a model's layers."""

    index: int
    parts: int

    def of(self, layers: int) -> slice:
        """Which layers these are."""
        return slice(self.index * layers // self.parts, (self.index + 1) * layers // self.parts)


class Model(Protocol):
    """What runs on the device."""

    def write(self, row: Row, first: int, last: int, part: Part) -> None:
        """Write KV of positions [first, last) of a row, in the layers of `part`."""

    def check(self, row: Row) -> None:
        """Look at the KV that is unchecked, before the step ends: it takes time."""

    def sample(self, rows: list[Row]) -> list[int]:
        """The next token of each row."""


class Step:
    """One launched forward pass; times are monotonic seconds."""

    def __init__(self, rows: list[Row], launched_at: float, start: float, end: float) -> None:
        self.rows = rows
        self.launched_at = launched_at
        self.start = start
        self.end = end
        parts = _PARTS if end - start >= _LONG_S else 1
        self._parts = [threading.Event() for _ in range(parts)]
        self._done = threading.Event()
        self._sampled: dict[str, int] = {}
        self._error: BaseException | None = None

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

    def event_after(self, share: float) -> "Event":
        """Fires when this share of the layers (0 to 1) has been computed."""
        return Event(self._parts[max(0, math.ceil(share * len(self._parts)) - 1)])

    # for the device -------------------------------------------------------------------------------------
    def parts(self) -> Iterator[tuple[Part, float]]:
        """Each part, and when it ends."""
        for i in range(len(self._parts)):
            part = Part(i, len(self._parts))
            yield part, self.start + (self.end - self.start) * (i + 1) / part.parts

    def computed(self, part: Part) -> None:
        """The KV of these layers is there."""
        self._parts[part.index].set()

    def finish(self, sampled: dict[str, int], error: BaseException | None = None) -> None:
        """Everything is done, or has failed."""
        self._sampled, self._error = sampled, error
        for event in self._parts:
            event.set()
        self._done.set()


class Event:
    """Fires when everything launched on the stream before it was recorded has been computed."""

    def __init__(self, fired: threading.Event | None) -> None:
        self._fired = fired

    def query(self) -> bool:
        """Whether it has fired."""
        return self._fired is None or self._fired.is_set()

    def synchronize(self) -> None:
        """Wait until it has fired."""
        if self._fired is not None:
            self._fired.wait()


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
        self._launched_share = 1.0
        self._write_s = 2e-6  # seconds per token written, measured as we go
        self._thread = threading.Thread(target=self._run, name="sim-device", daemon=True)
        self._thread.start()

    def launch(self, rows: list[Row], cost_s: float) -> Step:
        """Queue a forward pass of `cost_s` seconds and return at once."""
        now = time.monotonic()
        start = max(now, self._last.end) if self._last else now
        step = Step(rows, now, start, start + cost_s)
        self._last, self._launched_share = step, 1.0
        with self._wake:
            self._steps.append(step)
            self._wake.notify()
        return step

    def at_layer(self, layer: int, layers: int) -> None:
        """The launching thread has come past `layer` (from 0) of the step launched last."""
        self._launched_share = (layer + 1) / layers

    def record_event(self) -> Event:
        """An event after everything launched so far."""
        return self._last.event_after(self._launched_share) if self._last else Event(None)

    def close(self) -> None:
        """Finish what was launched, then end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while (step := self._next()) is not None:
            try:
                step.finish(self._execute(step))
            except BaseException as error:
                step.finish({}, error)
            self._finished(step)

    def _next(self) -> Step | None:
        with self._wake:
            while not self._steps and not self._closed:
                self._wake.wait()
            return self._steps.popleft() if self._steps else None

    def _execute(self, step: Step) -> dict[str, int]:
        tokens = sum(row.end - row.start for row in step.rows)
        _sleep_until(step.start)  # not before: what is loaded may still be on its way while the step waits its turn
        for row in step.rows:
            self._model.check(row)
        for part, until in step.parts():
            # the bytes must be there when the part ends, and as little as possible before
            _sleep_until(until - tokens * self._write_s / part.parts)
            before = time.monotonic()
            for row in step.rows:
                self._write(row, part)
            if tokens > _WRITE_CHUNK:
                took = (time.monotonic() - before) * part.parts / tokens
                self._write_s = 0.5 * self._write_s + 0.5 * took
            _sleep_until(until)
            step.computed(part)
        return self._sample([row for row in step.rows if row.samples])

    def _write(self, row: Row, part: Part) -> None:
        for first in range(row.start, row.end, _WRITE_CHUNK):
            self._model.write(row, first, min(first + _WRITE_CHUNK, row.end), part)

    def _sample(self, rows: list[Row]) -> dict[str, int]:
        sampled = {}
        for row, token in zip(rows, self._model.sample(rows), strict=True):
            row.tokens.append(token)
            sampled[row.request_id] = token
        return sampled


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
