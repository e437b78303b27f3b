"""A run as a Chrome trace (open it at ui.perfetto.dev): engine threads, devices, transfer threads and clients.

All processes of one host share the monotonic clock, so the lanes line up by themselves.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from kvpush.bench.client import Answer
from kvpush.bench.split import split_ttft
from kvpush.bench.visit import Visited
from kvpush.core.events import TransferRecord

_Event = dict[str, Any]

_CLIENT, _DEVICES, _TRANSFERS, _HANDOVER, _ENGINES = 1, 2, 3, 4, 5
_GROUPS = {
    _CLIENT: "client",
    _HANDOVER: "hand-over",
    _ENGINES: "engine threads",
    _DEVICES: "devices",
    _TRANSFERS: "transfer threads",
}


def write_trace(visits: Iterable[Visited], path: Path) -> None:
    """Write the first round of each contender."""
    events: list[_Event] = []
    for number, visited in enumerate(visited for visited in visits if visited.visit.round == 0):
        events += _Lanes(number * 10, visited.visit.contender.value).events(visited)
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


class _Lanes:
    """The lanes of one contender: Perfetto's processes are its groups, threads its lanes."""

    def __init__(self, first: int, contender: str) -> None:
        self._first = first
        self._contender = contender

    def events(self, visited: Visited) -> Iterator[_Event]:
        for group, name in _GROUPS.items():
            yield self._name("process_name", group, 0, f"{self._contender}: {name}")
        answers = [answer for measured in visited.cells for answer in measured.answers]
        for lane, answer in _in_lanes(answers):
            yield from self._client(lane, answer)
            yield from self._handover(lane, answer, visited)
        yield from self._devices(visited)
        yield from self._arrivals(visited)
        for lane, (title, records) in enumerate((("P", visited.logs.sent), ("D", visited.logs.received))):
            yield self._name("thread_name", _TRANSFERS, lane, f"{title} transfer thread")
            for record in records.values():
                yield from self._transfer(lane, record)

    def _client(self, lane: int, answer: Answer) -> Iterator[_Event]:
        args = {"request": answer.request_id, "transfer_id": answer.transfer_id, "error": answer.error}
        yield self._slice(_CLIENT, lane, "request", answer.sent, answer.ended, args)
        if answer.chunks:
            yield self._slice(_CLIENT, lane, "TTFT", answer.sent, answer.chunks[0], args)

    def _handover(self, lane: int, answer: Answer, visited: Visited) -> Iterator[_Event]:
        if not answer.chunks:
            return
        at = answer.sent
        for stage, ms in split_ttft(visited.logs, answer.transfer_id, answer.sent, answer.chunks[0]).items():
            if ms > 0:
                yield self._slice(_HANDOVER, lane, stage, at, at + ms / 1e3, {"transfer_id": answer.transfer_id})
            at += ms / 1e3

    def _devices(self, visited: Visited) -> Iterator[_Event]:
        for lane, (engine, steps) in enumerate(visited.logs.steps.items()):
            yield self._name("thread_name", _DEVICES, lane, engine)
            yield self._name("thread_name", _ENGINES, lane, f"{engine} engine thread")
            for step in steps:
                yield {"ph": "i", "s": "t", "name": "launch", "ts": step.launched * 1e6, **self._place(_ENGINES, lane)}
                tokens = sum(row.end - row.start for row in step.rows)
                args = {"requests": len(step.rows), "tokens": tokens}
                name = f"prefill {tokens}" if tokens > len(step.rows) else f"decode {len(step.rows)}"
                yield self._slice(_DEVICES, lane, name, step.start, step.end, args)

    def _arrivals(self, visited: Visited) -> Iterator[_Event]:
        """On the engine threads' lanes, in the order of `logs.steps`."""
        for lane, legs in enumerate((visited.logs.prefill, visited.logs.decode)):
            for transfer_id, leg in legs.items():
                if leg.arrived is not None:
                    place = {"ts": leg.arrived * 1e6, **self._place(_ENGINES, lane)}
                    yield {"ph": "i", "s": "t", "name": "arrival", "args": {"transfer_id": transfer_id}, **place}

    def _transfer(self, lane: int, record: TransferRecord) -> Iterator[_Event]:
        """Async slices: transfers of one thread overlap."""
        marks = sorted(record.at.items(), key=lambda mark: mark[1])
        for (stage, start), (_, end) in pairwise(marks):
            common = {"cat": "transfer", "id": str(record.key), "pid": self._first + _TRANSFERS, "tid": lane}
            yield {"ph": "b", "name": stage, "ts": start * 1e6, "args": {"key": str(record.key)}, **common}
            yield {"ph": "e", "name": stage, "ts": end * 1e6, **common}

    def _slice(self, group: int, lane: int, name: str, start: float, end: float, args: _Event) -> _Event:
        where = self._place(group, lane)
        return {"ph": "X", "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args, **where}

    def _place(self, group: int, lane: int) -> _Event:
        return {"pid": self._first + group, "tid": lane}

    def _name(self, kind: str, group: int, lane: int, name: str) -> _Event:
        return {"ph": "M", "name": kind, "pid": self._first + group, "tid": lane, "args": {"name": name}}


def _in_lanes(answers: list[Answer]) -> Iterator[tuple[int, Answer]]:
    """Give each request the first lane that is free when it is sent."""
    free_at: list[float] = []
    for answer in sorted(answers, key=lambda answer: answer.sent):
        lane = next((i for i, at in enumerate(free_at) if at <= answer.sent), len(free_at))
        free_at[lane:lane] = [] if lane < len(free_at) else [0.0]
        free_at[lane] = answer.ended
        yield lane, answer
