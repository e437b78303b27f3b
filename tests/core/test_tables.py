"""The state tables by themselves: every state, every input."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, get_args

import pytest
from core.drawing import DOCUMENT, drawn
from core.snapshot import fingerprint
from core.world import World

from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import Outcome
from kvpush.core.messages import Message
from kvpush.core.receiving import Receiving
from kvpush.core.sending import Sending
from kvpush.core.tables import RECEIVER, SENDER, Recv, RecvAction, RecvInput, Send, SendAction, SendInput

Table = Mapping[tuple[Any, Any], tuple[Any, tuple[Any, ...]]]


def reachable(table: Table, start: StrEnum) -> set[StrEnum]:
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        after = {entry[0] for (before, _), entry in table.items() if before is state} - found
        found |= after
        todo += after
    return found


@pytest.mark.parametrize(("table", "states"), [(SENDER, Send), (RECEIVER, Recv)], ids=["sender", "receiver"])
def test_every_state_can_be_reached_and_left_for_retired(table: Table, states: type[StrEnum]) -> None:
    assert reachable(table, states["NEW"]) == set(states)
    assert all(states["RETIRED"] in reachable(table, state) for state in states)


@pytest.mark.parametrize(
    ("table", "inputs", "actions"),
    [(SENDER, SendInput, SendAction), (RECEIVER, RecvInput, RecvAction)],
    ids=["sender", "receiver"],
)
def test_every_input_and_action_is_used(table: Table, inputs: type[StrEnum], actions: type[StrEnum]) -> None:
    assert {happened for _, happened in table} == set(inputs)
    assert {action for _, done in table.values() for action in done} == set(actions)


@pytest.mark.parametrize(("table", "states"), [(SENDER, Send), (RECEIVER, Recv)], ids=["sender", "receiver"])
def test_retired_is_never_left_and_always_reported(table: Table, states: type[StrEnum]) -> None:
    """R3: entering it retires, once; nothing leads out of it."""
    retired, retire = states["RETIRED"], {SendAction.RETIRE, RecvAction.RETIRE}
    assert not [before for before, _ in table if before is retired]
    for after, actions in table.values():
        assert len(retire.intersection(actions)) == (after is retired)


def test_sender_posts_only_where_writing_is_allowed() -> None:
    """R2."""
    assert {state for state, happened in SENDER if happened is SendInput.POST} == {Send.WAITING, Send.WRITING}
    advancing = {after for after, actions in SENDER.values() if SendAction.ADVANCE in actions}
    assert advancing == {Send.WAITING, Send.WRITING}


def test_sender_confirms_only_what_it_has_held_all_along() -> None:
    """R6 with pull: from the offer on the state is never left and entered again."""
    confirming = {key for key, (_, actions) in SENDER.items() if SendAction.CONFIRM in actions}
    assert confirming == {(Send.OFFERED, SendInput.RELEASE)}
    assert {state for (state, _), (after, _) in SENDER.items() if after is Send.OFFERED} == {
        Send.PROMISED,
        Send.OFFERED,
    }


def test_receiver_leaves_reads_in_flight_only_when_they_have_stopped_or_after_a_time() -> None:
    """R1 with pull."""
    assert not ends_of(RECEIVER, Recv.READING, Recv.RETIRED) | ends_of(RECEIVER, Recv.STOPPING, Recv.RETIRED)
    assert ends_of(RECEIVER, Recv.SEVERED, Recv.RETIRED) == {RecvInput.SAFE}
    freeing = {key for key, (_, actions) in RECEIVER.items() if RecvAction.FREE in actions}
    assert not [happened for state, happened in freeing if state in (Recv.READING, Recv.SEVERED)]
    assert ends_of(RECEIVER, Recv.STOPPING, Recv.CANCELLING) == {RecvInput.STOPPED}


def test_sender_leaves_writes_in_flight_only_when_they_have_stopped() -> None:
    """R2: nothing else ends a transfer that is writing or draining."""
    ends = ends_of(SENDER, Send.WRITING, Send.RETIRED) | ends_of(SENDER, Send.DRAINING, Send.RETIRED)
    assert ends == {SendInput.COMPLETE, SendInput.STOPPED}


def ends_of(table: Table, state: StrEnum, end: StrEnum) -> set[StrEnum]:
    """The inputs that lead from a state to its end."""
    return {happened for (before, happened), (after, _) in table.items() if before is state and after is end}


def test_every_cancel_is_answered() -> None:
    """R9."""
    answers = {state: SENDER[state, SendInput.CANCEL][1] for state in Send if state is not Send.RETIRED}
    assert all(SendAction.DROP in actions or SendAction.DRAIN in actions for actions in answers.values())


def test_receiver_frees_registered_blocks_only_by_a_word_or_by_time() -> None:
    """R1. A transfer that was never registered is doomed when its sender cannot be told to give it up."""
    words = {RecvInput.COMPLETE, RecvInput.FAIL, RecvInput.RELEASE}
    assert ends_of(RECEIVER, Recv.REGISTERED, Recv.RETIRED) == words
    assert ends_of(RECEIVER, Recv.ACCEPTED, Recv.RETIRED) == words
    assert ends_of(RECEIVER, Recv.CANCELLING, Recv.RETIRED) == words | {RecvInput.DOOMED}
    assert ends_of(RECEIVER, Recv.QUARANTINED, Recv.RETIRED) == words | {RecvInput.SAFE}


def test_every_state_of_a_receiver_takes_an_abort_and_the_loss_of_its_peer() -> None:
    for state in set(Recv) - {Recv.NEW, Recv.RETIRED}:
        assert (state, RecvInput.ABORT) in RECEIVER
        assert (state, RecvInput.PEER_LOST) in RECEIVER


# the tables in use ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", [state for state in Send if state is not Send.RETIRED])
@pytest.mark.parametrize("happened", SendInput)
def test_sender_takes_an_input_or_changes_nothing(world: World, state: Send, happened: SendInput) -> None:
    p = world.start("p")
    sender, key = p.endpoint._sender, world.key()
    transfer = sender._transfers[key] = Sending(key, world.now, state)
    if (state, happened) in SENDER:
        return
    before = fingerprint(p.endpoint, world.now)
    with pytest.raises(LocalProtocolError, match=f"{happened} is not possible when {state}"):
        sender._step(transfer, happened, world.now)
    assert fingerprint(p.endpoint, world.now) == before
    assert [*p.endpoint.take_effects(), *p.endpoint.take_events()] == []


@pytest.mark.parametrize("state", [state for state in Recv if state is not Recv.RETIRED])
@pytest.mark.parametrize("happened", RecvInput)
def test_receiver_takes_an_input_or_changes_nothing(world: World, state: Recv, happened: RecvInput) -> None:
    p, d = world.pair()
    receiver, key = d.endpoint._receiver, world.key()
    transfer = receiver._transfers[key] = Receiving(key, "r", p.target, state)  # type: ignore[arg-type]
    if (state, happened) in RECEIVER:
        return
    before = fingerprint(d.endpoint, world.now)
    with pytest.raises(LocalProtocolError, match=f"{happened} is not possible when {state}"):
        receiver._step(transfer, happened, world.now, (Outcome.FAILED, Reason.ABORTED, ""))
    assert fingerprint(d.endpoint, world.now) == before
    assert [*d.endpoint.take_effects(), *d.endpoint.take_events()] == []


# the document ---------------------------------------------------------------------------------------------
def test_document_shows_the_tables_as_they_are() -> None:
    text = DOCUMENT.read_text()
    assert drawn(text) == text, "run tests/core/drawing.py"


def test_document_names_every_message() -> None:
    text = DOCUMENT.read_text()
    assert not [kind.__name__ for kind in get_args(Message) if f"| `{kind.__name__}` |" not in text]
