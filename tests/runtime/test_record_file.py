from pathlib import Path

import pytest

from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Ended, Outcome, Role, TransferRecord
from kvpush.core.ids import Key, RequestId, TransferId
from kvpush.runtime.record_file import VARIABLE, open_record_file, read_records
from kvpush.runtime.records import TransferLog


def record(name: str, at: float) -> TransferRecord:
    return TransferRecord(
        key=Key(TransferId(name)),
        role=Role.SENDER,
        request_id=RequestId("r"),
        peer="decode-0/0@1",
        outcome=Outcome.DELIVERED,
        reason=Reason.OK,
        blocks=3,
        at={"announced": at, "ended": at + 1},
    )


def test_log_appends_each_ended_transfer_to_the_file_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "records"))
    for log in (TransferLog(), TransferLog()):
        log.record(Ended(record("b", 2.0)), 0.0)
        log.record(Counted("late_message", Reason.RETIRED_TRANSFER), 0.0)
        log.record(Ended(record("a", 1.0)), 0.0)
    assert read_records(tmp_path / "records") == [record("a", 1.0)] * 2 + [record("b", 2.0)] * 2


def test_no_file_is_opened_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert open_record_file() is None


def test_folder_that_cannot_be_made_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        open_record_file({VARIABLE: str(tmp_path / "file" / "records")})
