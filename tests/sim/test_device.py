import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvpush.sim.device import Part, Row, Step, Stream, TokenStore

LAYERS = 16


class Recorder:
    """A model that notes what it is asked to do, and samples what it is told."""

    def __init__(self, sampled: int = 7) -> None:
        self.calls: list[tuple[str, str, float]] = []
        self._sampled = sampled
        self.fails = False

    def write(self, row: Row, first: int, last: int, part: Part) -> None:
        layers = part.of(LAYERS)
        self.calls.append((f"write {first}-{last} {layers.start}-{layers.stop}", row.request_id, time.monotonic()))

    def check(self, row: Row) -> None:
        if row.unchecked:
            self.calls.append((f"check {row.unchecked}", row.request_id, time.monotonic()))

    def sample(self, rows: list[Row]) -> list[int]:
        if self.fails:
            raise RuntimeError("no power")
        self.calls += [("sample", row.request_id, time.monotonic()) for row in rows]
        return [self._sampled] * len(rows)


@pytest.fixture
def model() -> Recorder:
    return Recorder()


@pytest.fixture
def stream(model: Recorder) -> Iterator[Stream]:
    stream = Stream(model)
    yield stream
    stream.close()


def row(name: str, start: int, end: int, samples: bool = True, unchecked: range = range(0)) -> Row:
    tokens = np.arange(end, dtype=np.int64)
    return Row(name, TokenStore(tokens), np.arange(4, dtype=np.int64), start, end, samples, unchecked)


def test_launch_returns_while_the_device_works_for_the_modelled_time(stream: Stream) -> None:
    before = time.monotonic()
    step = stream.launch([row("a", 0, 8)], 0.1)
    assert time.monotonic() - before < 0.05
    assert not step.done
    assert step.tokens() == {"a": 7}
    assert 0.1 <= time.monotonic() - before < 0.2


def test_steps_take_place_one_after_the_other(stream: Stream, model: Recorder) -> None:
    first = stream.launch([row("a", 0, 8)], 0.01)
    second = stream.launch([row("b", 0, 8)], 0.01)
    assert second.start == pytest.approx(first.end)
    second.tokens()
    assert [call[:2] for call in model.calls] == [
        ("write 0-8 0-16", "a"),
        ("sample", "a"),
        ("write 0-8 0-16", "b"),
        ("sample", "b"),
    ]


def test_long_step_writes_a_few_layers_at_a_time_near_their_modelled_time(stream: Stream, model: Recorder) -> None:
    step = stream.launch([row("a", 0, 8)], 0.4)
    step.tokens()
    writes = [(name, at - step.start) for name, _, at in model.calls if name.startswith("write")]
    assert [name for name, _ in writes] == [f"write 0-8 {first}-{first + 2}" for first in range(0, LAYERS, 2)]
    for i, (_, at) in enumerate(writes):
        assert 0.05 * (i + 1) - 0.02 < at


def test_event_recorded_between_layers_fires_between_them(stream: Stream, model: Recorder) -> None:
    step = stream.launch([row("a", 0, 8)], 0.4)
    stream.at_layer(LAYERS // 2 - 1, LAYERS)
    half = stream.record_event()
    stream.at_layer(LAYERS - 1, LAYERS)
    last = stream.record_event()
    half.synchronize()
    written = len(model.calls)
    assert step.start + 0.2 <= time.monotonic()
    assert written >= 4
    last.synchronize()
    assert len([name for name, _, _ in model.calls if name.startswith("write")]) == 8
    assert time.monotonic() >= step.end


def test_row_that_does_not_sample_gets_no_token(stream: Stream) -> None:
    partial, last = row("a", 0, 8, samples=False), row("b", 4, 8)
    assert stream.launch([partial, last], 0.0).tokens() == {"b": 7}
    assert len(partial.tokens) == 8
    assert last.tokens.between(8, 9).tolist() == [7]


def test_event_fires_after_what_was_launched_before_it(stream: Stream) -> None:
    assert stream.record_event().query()
    step = stream.launch([row("a", 0, 8)], 0.05)
    event = stream.record_event()
    assert not event.query()
    event.synchronize()
    assert step.done


def test_loaded_kv_is_checked_when_the_step_begins_and_not_before(stream: Stream, model: Recorder) -> None:
    first = stream.launch([row("a", 0, 8)], 0.05)
    second = stream.launch([row("b", 6, 8, unchecked=range(2, 6))], 0.05)
    second.tokens()
    [(_, name, at)] = [call for call in model.calls if call[0] == "check range(2, 6)"]
    assert name == "b"
    assert first.end <= at < second.end


def test_failure_of_the_model_reaches_whoever_waits_and_not_the_next_step(stream: Stream, model: Recorder) -> None:
    model.fails = True
    step = stream.launch([row("a", 0, 8)], 0.0)
    with pytest.raises(RuntimeError, match="device failed"):
        step.tokens()
    model.fails = False
    assert stream.launch([row("b", 0, 8)], 0.0).tokens() == {"b": 7}


def test_close_finishes_what_was_launched(model: Recorder) -> None:
    finished: list[Step] = []
    stream = Stream(model, finished.append)
    step = stream.launch([row("a", 0, 8)], 0.02)
    stream.close()
    assert finished == [step]
    assert "sim-device" not in {thread.name for thread in threading.enumerate()}


def test_token_store_grows_without_changing_what_it_holds() -> None:
    store = TokenStore(np.array([5, 6], dtype=np.int64))
    for token in range(500):
        store.append(token)
    assert store.between(0, 4).tolist() == [5, 6, 0, 1]
    assert len(store) == 502
