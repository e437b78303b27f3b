"""The model check for receivers that register late and want the first token: every interleaving of a prompt that is
announced, begun, sampled, final or withdrawn with watching, registering and giving up, or with one fault anywhere."""

import pytest
from core.begun_model import BegunModel
from core.bounds import EACH, Bounds
from core.explore import Say, Violation, explore, say, walk

from kvpush.core.mode import Mode
from kvpush.core.tables import RECEIVER, SENDER, Recv, RecvInput, Send, SendInput


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "fault"), EACH)
def test_late_registration_with_one_fault_anywhere(mode: Mode, fault: str, record_property: Say) -> None:
    """Of a prompt that nobody gives up."""
    search = explore(Bounds(plain=1, kinds=(fault,), mode=mode), 100_000, BegunModel)
    say(f"late registration and first token, {mode}, one fault ({fault})", search, record_property)
    assert search.is_complete


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", Mode)
def test_late_registration_that_may_be_given_up(mode: Mode, record_property: Say) -> None:
    """Aborted, withdrawn or both, at any time; no faults."""
    search = explore(Bounds(faults=0, mode=mode), 100_000, BegunModel)
    say(f"late registration and first token, {mode}, given up or not, no faults", search, record_property)
    assert search.is_complete


@pytest.mark.parametrize("mode", Mode)
def test_two_late_registrations_with_three_faults_at_random(mode: Mode, record_property: Say) -> None:
    search = walk(Bounds(transfers=2, faults=3, mode=mode), range(200), 60, BegunModel)
    say(f"two late registrations, {mode}, three faults, at random", search, record_property)


def test_check_finds_a_watcher_that_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """R4 broken: a prompt that begins is told to nobody, and the question is not repeated."""
    monkeypatch.setitem(SENDER, (Send.ANNOUNCED, SendInput.BEGIN), (Send.ANNOUNCED, ()))
    monkeypatch.setitem(SENDER, (Send.ANNOUNCED, SendInput.FINAL), (Send.HELD, ()))
    monkeypatch.setitem(RECEIVER, (Recv.WATCHING, RecvInput.READY), (Recv.WATCHING, ()))
    with pytest.raises(Violation, match="R4"):
        explore(Bounds(faults=0), 30_000, BegunModel)
