"""The protocol's model check: every interleaving of small configurations over the real endpoints.

In each state the rules R1 to R4 and R6 hold, and from each state everything ends once faults stop. The faults are
those of `bounds.FAULTS`, at every point; how many there may be is what bounds a search. A search that says "all of" has
visited each state of its configuration, and followed each step from it.
"""

import pytest
from core.bounds import EACH, FAULTS, Bounds
from core.explore import Say, Violation, explore, say, walk

from kvpush.core import receiver
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome
from kvpush.core.mode import Mode
from kvpush.core.receiving import Receiving
from kvpush.core.tables import RECEIVER, SENDER, Recv, RecvAction, RecvInput, Send, SendAction, SendInput


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_transfer_with_one_fault_anywhere(fault: str, mode: Mode, record_property: Say) -> None:
    search = explore(Bounds(kinds=(fault,), mode=mode), most_states=30_000)
    say(f"one transfer, {mode}, one fault ({fault})", search, record_property)
    assert search.is_complete


@pytest.mark.timeout(600)
def test_one_transfer_in_two_parts_without_faults(record_property: Say) -> None:
    search = explore(Bounds(blocks=2, faults=0), most_states=30_000)
    say("one transfer in two parts, no faults", search, record_property)
    assert search.is_complete


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "fault"), EACH)
def test_two_transfers_with_one_fault_anywhere(mode: Mode, fault: str, record_property: Say) -> None:
    """Both may be asked for, computed and moved in any order; neither is aborted or withdrawn."""
    search = explore(Bounds(transfers=2, plain=2, kinds=(fault,), mode=mode), most_states=300_000)
    say(f"two transfers, {mode}, one fault ({fault})", search, record_property)
    assert search.is_complete


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", Mode)
def test_two_transfers_of_which_one_may_be_given_up(mode: Mode, record_property: Say) -> None:
    """Aborted, withdrawn or both, at any time, while the other one goes on; no faults."""
    search = explore(Bounds(transfers=2, plain=1, faults=0, mode=mode), most_states=100_000)
    say(f"two transfers, {mode}, one of them given up or not, no faults", search, record_property)
    assert search.is_complete


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", Mode)
def test_two_transfers_in_two_parts_with_three_faults_at_random(mode: Mode, record_property: Say) -> None:
    """Every kind of fault, deeper than every interleaving can be followed."""
    search = walk(Bounds(transfers=2, blocks=2, faults=3, mode=mode), range(400), steps=60)
    say(f"two transfers in two parts, {mode}, three faults, at random", search, record_property)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(faults=2),
        Bounds(blocks=2),
        Bounds(transfers=2, plain=1),
        Bounds(transfers=2, faults=0),
    ],
    ids=["two faults", "two parts", "given up", "given up, no fault"],
)
def test_larger_configurations(bounds: Bounds, record_property: Say) -> None:
    search = explore(bounds, most_states=400_000)
    say(str(bounds), search, record_property)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_transfers_at_random_for_long(record_property: Say) -> None:
    search = walk(Bounds(transfers=2, blocks=2, faults=4), range(1000, 6000), steps=80)
    say("two transfers in two parts, four faults, at random", search, record_property)


# the check itself: a protocol with a hole in it is caught -------------------------------------------------
def caught(bounds: Bounds) -> str:
    with pytest.raises(Violation) as violation:
        explore(bounds, most_states=30_000)
    return str(violation.value)


def test_check_finds_blocks_that_are_freed_when_cancelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9 broken: the abort does not wait for an answer."""
    freed = (Recv.CANCELLING, (RecvAction.FREE, RecvAction.CANCEL))
    monkeypatch.setitem(RECEIVER, (Recv.ACCEPTED, RecvInput.ABORT), freed)
    assert caught(Bounds(faults=0)).startswith("R1")


def test_check_finds_a_source_that_is_freed_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2 broken: an abort of the prefill ends the transfer at once."""
    monkeypatch.setitem(
        SENDER, (Send.WRITING, SendInput.WITHDRAW), (Send.RETIRED, (SendAction.TELL, SendAction.RETIRE))
    )
    assert caught(Bounds(blocks=2, faults=0)).startswith("R2")


def test_check_finds_a_quarantine_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1 broken: blocks come back as soon as the sender is lost."""
    short = (Recv.RETIRED, (RecvAction.RETIRE,))
    monkeypatch.setitem(RECEIVER, (Recv.ACCEPTED, RecvInput.PEER_LOST), short)
    assert caught(Bounds(kinds=("crash p",))).startswith("R1")


def test_check_finds_a_transfer_that_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """R4 broken: a cancel is never repeated, and nothing bounds the wait for its answer."""
    monkeypatch.setattr(receiver.Receiver, "_wait", lambda *_: None)
    assert caught(Bounds(faults=1, kinds=("lose",))).startswith("R4")


def test_check_finds_blocks_that_are_freed_under_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1 broken: an abort does not wait for our own reads."""
    freed = (Recv.CANCELLING, (RecvAction.FREE, RecvAction.CANCEL))
    monkeypatch.setitem(RECEIVER, (Recv.READING, RecvInput.ABORT), freed)
    assert caught(Bounds(faults=0, mode=Mode.PULL)).startswith("R1")


def test_check_finds_a_severed_read_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1 broken: blocks come back as soon as the transport has let go of a read."""
    monkeypatch.setitem(RECEIVER, (Recv.READING, RecvInput.PEER_LOST), (Recv.RETIRED, (RecvAction.RETIRE,)))
    assert caught(Bounds(kinds=("crash p",), mode=Mode.PULL)).startswith("R1")


def test_check_finds_text_that_nobody_has_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """R6 broken: the receiver believes what it has read."""
    monkeypatch.setitem(RECEIVER, (Recv.READING, RecvInput.READ), (Recv.RETIRED, (RecvAction.RETIRE,)))
    monkeypatch.setattr(Receiving, "ending", (Outcome.DELIVERED, Reason.OK, ""))
    assert caught(Bounds(kinds=("lose", "hang p"), faults=2, mode=Mode.PULL)).startswith("R6")
