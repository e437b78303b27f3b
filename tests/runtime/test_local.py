"""What transfer threads say directly to their engine's scheduler, over real sockets: a hint, which may be lost."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Outcome, PrefillBegun, ReceiveEnded
from kvpush.core.ids import Key, RequestId, TransferId
from kvpush.runtime.local import Inlet, Outlet

KEY, NAME = Key(TransferId("0" * 32)), RequestId("r")
BEGUN = PrefillBegun(KEY, NAME)
DELIVERED = ReceiveEnded(KEY, NAME, Outcome.DELIVERED, Reason.OK, token=7)
FAILED = ReceiveEnded(KEY, NAME, Outcome.FAILED, Reason.TRANSPORT)


@pytest.fixture
def outlets() -> Iterator[list[Outlet]]:
    """Two ranks."""
    made = [Outlet(), Outlet()]
    yield made
    for outlet in made:
        outlet.close()


@pytest.fixture
def inlet(outlets: list[Outlet]) -> Iterator[Inlet]:
    made = Inlet(outlet.path for outlet in outlets)
    yield made
    made.close()


def test_scheduler_hears_each_rank_once_and_only_what_cannot_wait(outlets: list[Outlet], inlet: Inlet) -> None:
    outlets[0].send([BEGUN, Counted("x", Reason.OK), FAILED])
    outlets[0].send([DELIVERED])
    outlets[1].send([DELIVERED])
    assert inlet.take() == [BEGUN, DELIVERED, DELIVERED]
    assert inlet.take() == []
    assert inlet.ranks == 2


def test_many_events_at_once_arrive_in_order(outlets: list[Outlet], inlet: Inlet) -> None:
    events = [PrefillBegun(KEY, RequestId(f"r{number}")) for number in range(250)]
    outlets[0].send(events)
    assert inlet.take() == events


def test_nobody_waits_for_a_scheduler_that_does_not_listen(outlets: list[Outlet]) -> None:
    for _ in range(10_000):
        outlets[0].send([DELIVERED])
    late = Inlet([outlets[0].path])
    for _ in range(10_000):
        outlets[0].send([DELIVERED])
    heard = late.take()
    assert 0 < len(heard) < 10_000, "what does not fit is dropped"
    late.close()
    outlets[0].send([DELIVERED])


def test_scheduler_goes_on_when_a_rank_ends_or_is_elsewhere(outlets: list[Outlet]) -> None:
    inlet = Inlet([outlets[0].path, outlets[1].path, "", "/nowhere/at/all"])
    outlets[1].send([DELIVERED])
    outlets[0].close()
    assert inlet.take() == [DELIVERED]
    assert inlet.take() == []
    assert inlet.ranks == 4, "so that no request ever seems to have been received by all"
    inlet.close()


def test_socket_is_for_the_engines_user_alone_and_leaves_nothing_behind() -> None:
    outlet = Outlet()
    folder = Path(outlet.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    outlet.close()
    outlet.close()
    assert not folder.exists()
