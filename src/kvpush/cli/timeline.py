"""What both sides know of one transfer, as one story in order of time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpush.core.events import Role, TransferRecord
from kvpush.runtime.recordfile import read_records

STAGES: Mapping[tuple[Role, str], str] = {
    (Role.RECEIVER, "expected"): "decode: the request is here, no blocks yet",
    (Role.RECEIVER, "begun"): "decode: prefill has begun",
    (Role.RECEIVER, "requested"): "decode: blocks allocated",
    (Role.RECEIVER, "registered"): "decode: registered where the cache must go",
    (Role.RECEIVER, "accepted"): "decode: prefill has accepted",
    (Role.RECEIVER, "noticed"): "decode: the notice of the write is here",
    (Role.RECEIVER, "offered"): "decode: knows where to read",
    (Role.RECEIVER, "posted"): "decode: read posted",
    (Role.RECEIVER, "read"): "decode: read done",
    (Role.RECEIVER, "ended"): "decode: delivered, the request can run",
    (Role.SENDER, "announced"): "prefill: the request is here",
    (Role.SENDER, "begun"): "prefill: its last step has been scheduled",
    (Role.SENDER, "registered"): "prefill: knows where to write",
    (Role.SENDER, "final"): "prefill: the prompt's blocks are final",
    (Role.SENDER, "offered"): "prefill: has said where to read",
    (Role.SENDER, "released"): "prefill: all has been read, and rightly",
    (Role.SENDER, "first_posted"): "prefill: first write posted",
    (Role.SENDER, "posted"): "prefill: write posted",
    (Role.SENDER, "written"): "prefill: write done",
    (Role.SENDER, "ended"): "prefill: its blocks are free again",
}


@dataclass(frozen=True)
class Moment:
    """Something that happened `at` a time of this host's monotonic clock, in seconds."""

    at: float
    what: str


def records_of(folder: Path, transfer_id: str) -> list[TransferRecord]:
    """The records of one transfer that the processes logging into `folder` have written so far."""
    records = [record for path in sorted(folder.glob("records-*.jsonl")) for record in read_records(path)]
    return [record for record in records if record.key.transfer_id == transfer_id]


def moments(records: list[TransferRecord]) -> list[Moment]:
    """Every stage of every record, in order of time."""
    found = [
        Moment(at, STAGES.get((record.role, stage), f"{record.role}: {stage}"))
        for record in records
        for stage, at in record.at.items()
    ]
    return sorted(found, key=lambda moment: moment.at)
