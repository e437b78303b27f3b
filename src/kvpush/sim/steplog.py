"""A file of what the device did: one JSON line per step, for the hand-over split and traces."""

from pathlib import Path
from typing import BinaryIO

import msgspec

from kvpush.sim.device import Step


class LoggedRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's part in a step: positions [start, end), and whether a token was sampled."""

    request_id: str
    start: int
    end: int
    samples: bool


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Monotonic seconds; the device worked in [start, end)."""

    launched: float
    start: float
    end: float
    rows: tuple[LoggedRow, ...]


class StepLog:
    """Appends steps to a file; does nothing without one. Used by the device's thread."""

    def __init__(self, path: Path | None) -> None:
        self._file: BinaryIO | None = path.open("ab", buffering=0) if path else None

    def step_finished(self, step: Step) -> None:
        """Write one line."""
        if self._file is None:
            return
        rows = tuple(LoggedRow(row.request_id, row.start, row.end, row.samples) for row in step.rows)
        logged = LoggedStep(launched=step.launched_at, start=step.start, end=step.end, rows=rows)
        self._file.write(msgspec.json.encode(logged) + b"\n")


def read_steps(path: Path) -> list[LoggedStep]:
    """The steps of one file; a line cut off by a kill is left out."""
    decoder = msgspec.json.Decoder(LoggedStep)
    return [decoder.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]
