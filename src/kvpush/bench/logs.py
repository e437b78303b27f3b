"""What a cluster's processes logged during one round, by transfer: steps, arrivals and transfer records."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from kvpush.core.events import Role, TransferRecord
from kvpush.runtime.recordfile import read_records
from kvpush.sim.hooktimes import arrivals_file, read_arrivals
from kvpush.sim.settings import ALONE, steps_file
from kvpush.sim.steplog import LoggedStep, read_steps

_TRANSFER_ID = re.compile(r"[0-9a-f]{32}")

PREFILL = "prefill-0"
DECODE = "decode-0"


@dataclass
class Leg:
    """One request in one engine: when it arrived, and the steps it took part in."""

    arrived: float | None = None
    steps: list[LoggedStep] = field(default_factory=list)

    @property
    def first_sampling(self) -> LoggedStep | None:
        """The step that gave the first token."""
        return self.steps[-1] if self.steps else None


@dataclass
class RoundLogs:
    """By transfer id (of the router), which is part of each engine's request id."""

    prefill: dict[str, Leg] = field(default_factory=dict)
    decode: dict[str, Leg] = field(default_factory=dict)
    sent: dict[str, TransferRecord] = field(default_factory=dict)
    received: dict[str, TransferRecord] = field(default_factory=dict)
    steps: dict[str, list[LoggedStep]] = field(default_factory=dict)


def read_round(folder: Path, alone: bool) -> RoundLogs:
    """Read all logs of one round's folder; what is missing is empty. `alone`: one engine without a connector."""
    logs = RoundLogs()
    if alone:
        logs.decode = _legs(folder, ALONE, logs)
    else:
        logs.prefill = _legs(folder, PREFILL, logs)
        logs.decode = _legs(folder, DECODE, logs)
    for path in sorted(folder.glob("records-*.jsonl")):
        for record in read_records(path):
            if found := _TRANSFER_ID.search(record.key.transfer_id):
                (logs.sent if record.role is Role.SENDER else logs.received)[found.group()] = record
    return logs


def transfer_of(request_id: str) -> str:
    """The transfer id in an engine's request id; "" when there is none."""
    found = _TRANSFER_ID.search(request_id)
    return found.group() if found else ""


def _legs(folder: Path, engine: str, logs: RoundLogs) -> dict[str, Leg]:
    legs: dict[str, Leg] = {}
    if (path := arrivals_file(folder, engine)).exists():
        for arrival in read_arrivals(path):
            legs.setdefault(transfer_of(arrival.request_id), Leg()).arrived = arrival.at
    if (path := steps_file(folder, engine)).exists():
        logs.steps[engine] = read_steps(path)
        for step in logs.steps[engine]:
            _add_step(legs, step)
    return legs


def _add_step(legs: dict[str, Leg], step: LoggedStep) -> None:
    """Keep the steps up to and with the first that sampled."""
    for row in step.rows:
        leg = legs.setdefault(transfer_of(row.request_id), Leg())
        sampled = any(r.samples for s in leg.steps[-1:] for r in s.rows if r.request_id == row.request_id)
        if not sampled:
            leg.steps.append(step)
