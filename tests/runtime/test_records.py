"""The log line of each transfer, and how many of them."""

import logging
import os
from pathlib import Path

import msgspec
import pytest

from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Ended, Outcome, PeerChanged, Role, TransferRecord
from kvpush.core.ids import Key, RequestId, TransferId
from kvpush.runtime.recordfile import VARIABLE, read_records
from kvpush.runtime.records import TransferLog, transfer_line

KEY = Key(TransferId("0123456789abcdef0123456789abcdef"), 2)
DELIVERED = TransferRecord(
    key=KEY,
    role=Role.RECEIVER,
    request_id=RequestId("cmpl-1"),
    peer="prefill@10.0.0.1:5600",
    outcome=Outcome.DELIVERED,
    reason=Reason.OK,
    tokens=100,
    nbytes=4096,
    descriptors=7,
    blocks=7,
    at={"requested": 50.0, "registered": 50.0015, "ended": 50.25},
)
FAILED = msgspec.structs.replace(DELIVERED, outcome=Outcome.FAILED, reason=Reason.PEER_SILENT, detail="no word")


def log(caplog: pytest.LogCaptureFixture, *records: TransferRecord, now: float = 1.0) -> list[logging.LogRecord]:
    transfers = TransferLog()
    with caplog.at_level(logging.DEBUG, "kvpush.transfer"):
        for record in records:
            transfers.record(Ended(record), now)
    transfers.close()
    return caplog.records


def test_line_names_the_key_and_all_that_is_known() -> None:
    assert transfer_line(FAILED) == (
        "transfer ended key=0123456789abcdef0123456789abcdef.2 role=receiver mode=push "
        "outcome=failed reason=peer_silent "
        "request=cmpl-1 peer=prefill@10.0.0.1:5600 tokens=100 blocks=7 bytes=4096 descriptors=7 "
        "requested=0.000ms registered=1.500ms ended=250.000ms detail='no word'"
    )


@pytest.mark.parametrize("reason", [Reason.ABORTED, Reason.PREFILL_ABORTED, Reason.SHUTDOWN])
def test_delivery_or_abort_is_logged_for_debugging_only(caplog: pytest.LogCaptureFixture, reason: Reason) -> None:
    lines = log(caplog, DELIVERED, msgspec.structs.replace(FAILED, reason=reason))
    assert [line.levelno for line in lines] == [logging.DEBUG] * 2
    assert {line.name for line in lines} == {"kvpush.transfer"}


def test_abnormal_end_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = log(caplog, FAILED)
    assert line.levelno == logging.WARNING
    assert str(KEY) in line.message


def test_many_abnormal_ends_of_a_kind_are_thinned_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    other = msgspec.structs.replace(FAILED, reason=Reason.TRANSPORT)
    lines = log(caplog, *[FAILED] * 100, other)
    assert len(lines) == 11
    assert "reason=transport" in lines[-1].message


def test_thinned_out_lines_are_told_of_later(caplog: pytest.LogCaptureFixture) -> None:
    transfers = TransferLog()
    for _ in range(13):
        transfers.record(Ended(FAILED), 1.0)
    transfers.record(Ended(FAILED), 7.0)
    assert caplog.records[-1].message.endswith(" suppressed=3")


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (PeerChanged("p@h:1", True, Reason.OK), logging.INFO, "peer ready peer=p@h:1"),
        (PeerChanged("p@h:1", False, Reason.INCOMPATIBLE, "dtype"), logging.WARNING, "reason=incompatible"),
        (Counted("late_message", Reason.RETIRED_TRANSFER), logging.DEBUG, "late_message"),
    ],
)
def test_other_events_are_logged_at_their_level(
    caplog: pytest.LogCaptureFixture, event: PeerChanged | Counted, level: int, text: str
) -> None:
    with caplog.at_level(logging.DEBUG, "kvpush.transfer"):
        TransferLog().record(event, 1.0)
    (line,) = caplog.records
    assert line.levelno == level
    assert text in line.message


def test_records_are_kept_in_a_file_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    log(caplog, DELIVERED, FAILED)
    (file,) = tmp_path.iterdir()
    assert read_records(file) == [DELIVERED, FAILED]


def test_records_that_cannot_be_written_are_given_up_with_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / f"records-{os.getpid()}.jsonl").symlink_to("/dev/full")
    lines = log(caplog, DELIVERED, FAILED, FAILED)
    said = [line.message for line in lines if line.levelno == logging.ERROR]
    assert said == [f"No more transfer records are kept in {tmp_path}: No space left on device."]
    assert sum("reason=peer_silent" in line.message for line in lines) == 2
