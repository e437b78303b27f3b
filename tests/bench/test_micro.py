import pytest

from kvpush.bench.joined import Joined
from kvpush.bench.micro import make_layout
from kvpush.bench.wakeup import wake_up_seconds


@pytest.mark.parametrize("in_flight", [1, 20])
def test_joined_endpoints_deliver_what_is_opened_and_count_their_inputs(in_flight: int) -> None:
    joined = Joined(make_layout(8, layers=2))
    joined.open(in_flight)
    assert joined.sender.transfers == joined.receiver.transfers == in_flight
    before = joined.inputs
    joined.deliver_oldest()
    assert joined.sender.transfers == joined.receiver.transfers == in_flight - 1
    assert joined.inputs - before >= 3  # the prompt, the write's end and its notice


def test_wake_up_is_measured_for_each_command() -> None:
    times = wake_up_seconds(make_layout(8, layers=2), 10)
    assert len(times) == 10
    assert all(0 < seconds < 5 for seconds in times)
