from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvpush.cli.ask import Answer
from kvpush.cli.demo import DemoFailed, blocks_of, judge
from kvpush.cli.timeline import moments, records_of
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, Role, TransferRecord
from kvpush.core.ids import Key, TransferId

ANSWER = Answer("The Alps.", {"x-kvpush-path": "pd"}, 1.0, 2.0, 3.0, 300, 4)


def record(role: Role, outcome: Outcome = Outcome.DELIVERED, blocks: int = 2, name: str = "t") -> TransferRecord:
    at = {"registered": 1.5, "ended": 2.0} if role is Role.RECEIVER else {"final": 1.2, "written": 1.9}
    reason = Reason.OK if outcome is Outcome.DELIVERED else Reason.PEER_LOST
    key = Key(TransferId(name))
    return TransferRecord(
        key=key, role=role, request_id=None, peer="p", outcome=outcome, reason=reason, blocks=blocks, at=at
    )


BOTH = [record(Role.SENDER), record(Role.RECEIVER)]


def test_demo_is_content_with_equal_texts_and_delivered_blocks() -> None:
    judge(ANSWER, ANSWER, BOTH)
    assert blocks_of(BOTH) == 2


@pytest.mark.parametrize(
    ("through", "alone", "records", "why"),
    [
        (ANSWER, replace(ANSWER, text="The Andes."), BOTH, "differ"),
        (replace(ANSWER, text=""), replace(ANSWER, text=""), BOTH, "empty"),
        (replace(ANSWER, headers={"x-kvpush-path": "local"}), ANSWER, BOTH, "no block .*local"),
        (replace(ANSWER, headers={}), ANSWER, BOTH, "no block"),
        (ANSWER, ANSWER, [], "no block"),
        (ANSWER, ANSWER, [record(Role.SENDER)], "no block"),
        (ANSWER, ANSWER, [record(Role.RECEIVER, Outcome.FAILED)], "no block"),
        (ANSWER, ANSWER, [record(Role.RECEIVER, blocks=0)], "no block"),
    ],
)
def test_demo_fails_when_it_has_shown_nothing(
    through: Answer, alone: Answer, records: list[TransferRecord], why: str
) -> None:
    with pytest.raises(DemoFailed, match=why):
        judge(through, alone, records)


def test_story_joins_both_sides_records_of_one_transfer_in_order_of_time(tmp_path: Path) -> None:
    for pid, role in ((1, Role.SENDER), (2, Role.RECEIVER)):
        lines = [msgspec.json.encode(record(role, name=name)) + b"\n" for name in ("t", "other")]
        (tmp_path / f"records-{pid}.jsonl").write_bytes(b"".join(lines))
    told = moments(records_of(tmp_path, "t"))
    assert [moment.at for moment in told] == [1.2, 1.5, 1.9, 2.0]
    assert [moment.what.split(":")[0] for moment in told] == ["prefill", "decode", "prefill", "decode"]
