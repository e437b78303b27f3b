"""Transfer records for the benchmark: one JSON line per ended transfer, when `KVPUSH_RECORDS` names a folder."""

import logging
import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvpush.core.events import TransferRecord

logger = logging.getLogger("kvpush.transfer")

VARIABLE = "KVPUSH_RECORDS"


class RecordFile:
    """Used by the thread that makes it. Without the variable it does nothing.

    Ends with the first line that could not be written whole (a full disk, say): no transfer depends on it.
    """

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE)
        path = Path(folder) / f"records-{os.getpid()}.jsonl" if folder else None
        self._file: BinaryIO | None = path.open("ab", buffering=0) if path else None

    def write(self, record: TransferRecord) -> None:
        """Append one line."""
        if self._file is None:
            return
        line = msgspec.json.encode(record) + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            self._give_up(error.strerror or str(error))
        else:
            if written != len(line):
                self._give_up("the last line was cut off")

    def _give_up(self, reason: str) -> None:
        logger.error("No more transfer records are kept in %s: %s.", os.environ.get(VARIABLE), reason)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_records(path: Path) -> list[TransferRecord]:
    """The records of one file; a line cut off by a kill is left out."""
    decoder = msgspec.json.Decoder(TransferRecord)
    return [decoder.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]
