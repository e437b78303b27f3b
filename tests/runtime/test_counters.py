"""Counters: what they count, and that they survive merging and travelling."""

import pickle

import msgspec
import pytest

from kvpush.core.errors import Reason
from kvpush.core.events import (
    Counted,
    Ended,
    ModeChosen,
    Outcome,
    PeerChanged,
    Purpose,
    Role,
    SourceFree,
    TransferRecord,
)
from kvpush.core.ids import Key, RequestId, TransferId
from kvpush.core.mode import Mode
from kvpush.runtime.counters import BOUNDS_S, STAGES, Counters, Histogram, Volume

KEY = Key(TransferId("0" * 32))
RECEIVED = TransferRecord(
    key=KEY,
    role=Role.RECEIVER,
    request_id=RequestId("r"),
    peer="p",
    outcome=Outcome.DELIVERED,
    reason=Reason.OK,
    tokens=10,
    nbytes=1000,
    descriptors=3,
    at={"expected": 1.0, "requested": 1.5, "registered": 1.6, "accepted": 1.75, "noticed": 2.0, "ended": 2.25},
)
SENT = msgspec.structs.replace(
    RECEIVED,
    role=Role.SENDER,
    at={"registered": 1.0, "announced": 1.25, "final": 1.5, "posted": 1.75, "written": 2.0, "ended": 2.25},
)
ABORTED = msgspec.structs.replace(RECEIVED, outcome=Outcome.FAILED, reason=Reason.ABORTED)


def counted(*records: TransferRecord) -> Counters:
    counters = Counters()
    counters.add_all(Ended(record) for record in records)
    return counters


def sums(counters: Counters) -> dict[tuple[str, str], float]:
    return {(str(role), name): histogram.sum_s for (role, name), histogram in counters.seconds.items()}


def test_transfers_are_counted_by_role_outcome_and_reason() -> None:
    assert counted(RECEIVED, RECEIVED, SENT, ABORTED).transfers == {
        (Role.RECEIVER, Outcome.DELIVERED, Reason.OK): 2,
        (Role.SENDER, Outcome.DELIVERED, Reason.OK): 1,
        (Role.RECEIVER, Outcome.FAILED, Reason.ABORTED): 1,
    }


def test_deliveries_are_counted_by_who_moved_the_bytes() -> None:
    pulled = msgspec.structs.replace(RECEIVED, mode=Mode.PULL)
    not_needed = msgspec.structs.replace(RECEIVED, reason=Reason.NOT_NEEDED)
    moved = counted(RECEIVED, pulled, pulled, SENT, ABORTED, not_needed).modes
    assert moved == {
        (Role.RECEIVER, Mode.PUSH): 1,
        (Role.RECEIVER, Mode.PULL): 2,
        (Role.SENDER, Mode.PUSH): 1,
    }


def test_latest_choice_of_each_pair_survives_merging_and_travelling() -> None:
    counters, later = Counters(), Counters()
    counters.add(ModeChosen("p", Mode.PUSH, 2e9, 1e9))
    later.add(ModeChosen("p", Mode.PULL, 1e9, 3e9))
    later.add(ModeChosen("q", Mode.PUSH, 1e9, 1e9))
    counters.merge(later)
    assert Counters.from_plain(counters.to_plain()).pairs == {
        "p": ModeChosen("p", Mode.PULL, 1e9, 3e9),
        "q": ModeChosen("q", Mode.PUSH, 1e9, 1e9),
    }


def test_only_delivered_transfers_have_moved_anything() -> None:
    assert counted(RECEIVED, RECEIVED, ABORTED).volumes == {Role.RECEIVER: Volume(20, 2000, 6)}


def test_tokens_of_earlier_turns_are_counted_as_reused() -> None:
    earlier = msgspec.structs.replace(RECEIVED, purpose=Purpose.CONVERSATION)
    assert counted(RECEIVED, earlier, earlier).volumes[Role.RECEIVER].reused == 20


def test_stages_of_both_roles_are_timed() -> None:
    assert sums(counted(RECEIVED, SENT)) == {
        ("receiver", "admission"): 0.5,
        ("receiver", "registration"): 0.25,
        ("receiver", "transfer"): 0.25,
        ("receiver", "total"): 0.75,
        ("sender", "prefill"): 0.25,
        ("sender", "lead"): 0.5,
        ("sender", "match"): 0.25,
        ("sender", "write"): 0.25,
        ("sender", "total"): 1.0,
    }


def test_stage_that_did_not_happen_or_came_the_other_way_round_is_not_timed() -> None:
    late = msgspec.structs.replace(SENT, at={"final": 1.0, "registered": 1.5, "posted": 1.5, "ended": 2.0})
    assert set(sums(counted(late))) == {("sender", "match")}


def test_counts_and_peers_are_counted_and_promises_are_not() -> None:
    counters = Counters()
    counters.add(Counted("late_message", Reason.RETIRED_TRANSFER))
    counters.add(Counted("late_message", Reason.RETIRED_TRANSFER))
    counters.add(PeerChanged("p", True, Reason.OK))
    counters.add(PeerChanged("p", False, Reason.PEER_SILENT))
    counters.add(SourceFree(KEY, RequestId("r")))
    assert counters.counted == {
        ("late_message", Reason.RETIRED_TRANSFER): 2,
        ("peer_ready", Reason.OK): 1,
    }


def test_merging_is_the_same_as_counting_together() -> None:
    merged = counted(RECEIVED, ABORTED)
    merged.merge(counted(SENT, RECEIVED))
    assert merged == counted(RECEIVED, ABORTED, SENT, RECEIVED)


def test_taking_leaves_nothing_and_shares_nothing() -> None:
    counters = counted(RECEIVED)
    taken = counters.take()
    assert counters.empty
    assert not taken.empty
    counters.add(Ended(RECEIVED))
    assert taken == counted(RECEIVED)


@pytest.mark.parametrize("counters", [Counters(), counted(RECEIVED, SENT, ABORTED)])
def test_counters_travel_by_pickle_and_as_plain_values(counters: Counters) -> None:
    assert pickle.loads(pickle.dumps(counters)) == counters
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(counters.to_plain()))
    assert Counters.from_plain(plain) == counters
    assert Counters.from_plain(msgspec.json.decode(msgspec.json.encode(counters.to_plain()))) == counters


def test_what_is_no_counters_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="transfers"):
        Counters.from_plain({"transfers": 3})


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (BOUNDS_S[0], 0), (BOUNDS_S[0] * 1.01, 1), (60.0, 15), (1e9, 16)]
)
def test_duration_falls_into_the_bucket_whose_bound_it_does_not_pass(seconds: float, bucket: int) -> None:
    histogram = Histogram()
    histogram.observe(seconds)
    assert histogram.buckets.index(1) == bucket
    assert histogram.count == 1
    assert histogram.sum_s == seconds


def test_stage_names_are_unique_per_role() -> None:
    for stages in STAGES.values():
        assert len({name for name, _, _ in stages}) == len(stages)


@pytest.mark.parametrize("field", Counters.__struct_fields__)
def test_counters_are_not_empty_whatever_they_hold(field: str) -> None:
    assert not Counters(**{field: {"something": 1}}).empty  # type: ignore[arg-type]
