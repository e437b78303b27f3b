import pytest
from bench.samples import ID, pair_logs, record, step

from kvpush.bench.logs import Leg, RoundLogs
from kvpush.bench.split import STAGES, split_ttft
from kvpush.core.events import Role


def test_stages_of_a_transfer_add_up_to_the_time_to_first_token() -> None:
    split = split_ttft(pair_logs(), ID, sent=10.0, first_token=10.4)
    assert sum(split.values()) == pytest.approx(400)
    assert split == pytest.approx(
        {
            "router": 50,
            "p_queue": 50,
            "p_compute": 200,
            "register": 0,  # it was early
            "match": 10,
            "post": 2,
            "wire": 28,
            "notice": 5,
            "d_wakeup": 15,
            "d_step": 20,
            "reply": 20,
        }
    )
    assert list(split) == [stage for stage in STAGES if stage in split]


def test_late_registration_is_charged_to_itself() -> None:
    logs = pair_logs()
    logs.sent[ID] = record(Role.SENDER, announced=10.1, final=10.31, registered=10.33, posted=10.335, written=10.34)
    split = split_ttft(logs, ID, sent=10.0, first_token=10.4)
    assert (split["register"], split["match"]) == pytest.approx((30, 0))
    assert sum(split.values()) == pytest.approx(400)


def test_notice_that_overtakes_the_senders_own_completion_ends_the_wire() -> None:
    logs = pair_logs()
    logs.received[ID] = record(Role.RECEIVER, registered=10.19, noticed=10.33)
    split = split_ttft(logs, ID, sent=10.0, first_token=10.4)
    assert (split["wire"], split["notice"], split["d_wakeup"]) == pytest.approx((18, 0, 30))


def test_without_transfer_records_the_transfer_is_one_stage() -> None:
    logs = pair_logs()
    logs.sent.clear()
    split = split_ttft(logs, ID, sent=10.0, first_token=10.4)
    assert split["transfer"] == pytest.approx(60)
    assert sum(split.values()) == pytest.approx(400)


def test_one_engine_alone_has_queue_compute_and_reply() -> None:
    logs = RoundLogs(decode={ID: Leg(None, [step(10.1, 10.1, 10.3)])})
    split = split_ttft(logs, ID, sent=10.0, first_token=10.31)
    assert split == pytest.approx({"p_queue": 100, "p_compute": 200, "reply": 10})


def test_token_that_came_before_the_transfer_ended_ends_the_split() -> None:
    """As when the router passes on the token that P has sampled."""
    split = split_ttft(pair_logs(), ID, sent=10.0, first_token=10.32)
    assert sum(split.values()) == pytest.approx(320)
    assert all(ms >= 0 for ms in split.values())


def test_request_in_no_log_has_no_split() -> None:
    assert split_ttft(RoundLogs(), ID, sent=0.0, first_token=1.0) == {}
