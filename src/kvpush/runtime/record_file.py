"""Every ended transfer as one JSON line, for the benchmark and the demo: switched on by `KVPUSH_RECORDS=FOLDER`.

Times are this host's monotonic clock in seconds, the same for all of its processes.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvpush.core.events import TransferRecord

VARIABLE = "KVPUSH_RECORDS"


class RecordFile:
    """`FOLDER/transfers-PID.jsonl`, opened anew for each line, so that nothing is left open."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError` when `folder` cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"transfers-{os.getpid()}.jsonl"

    def write(self, record: TransferRecord) -> None:
        """Append one line, by one system call: a reader never sees half of it. Raises `OSError`."""
        with self.path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(record) + b"\n")


def open_record_file(environ: Mapping[str, str] = os.environ) -> RecordFile | None:
    """The file that `KVPUSH_RECORDS` asks for, None when it asks for none. Raises `OSError`."""
    folder = environ.get(VARIABLE)
    return RecordFile(Path(folder)) if folder else None


def read_records(folder: Path) -> list[TransferRecord]:
    """All records in a folder, by the time of their first stage."""
    decoder = msgspec.json.Decoder(TransferRecord)
    lines = [line for path in sorted(folder.glob("transfers-*.jsonl")) for line in path.read_bytes().splitlines()]
    return sorted(map(decoder.decode, lines), key=lambda record: min(record.at.values(), default=0.0))
