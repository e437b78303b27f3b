"""The fault matrix: every cell is survived, and it would notice if one was not."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpush.bench.faults.cache import Cache
from kvpush.bench.faults.cells import try_cell
from kvpush.bench.faults.kinds import KINDS, PUSH_ONLY, Moment
from kvpush.bench.faults.matrix import run_matrix, sums
from kvpush.bench.faults.node import Policy
from kvpush.cli.main import app
from kvpush.core.endpoint import Endpoint
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, Purpose
from kvpush.core.mode import Mode
from kvpush.core.receiving import Receiving
from kvpush.core.tables import RECEIVER, Recv, RecvAction, RecvInput

LATE_WRITE = ("sender killed, write late", Moment.WRITING)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of failures are the purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", KINDS)
def test_every_moment_is_survived(kind: str) -> None:
    cells = run_matrix([kind])
    assert [cell for cell in cells if not cell.survived] == []
    for mode, purpose in {(cell.mode, cell.purpose) for cell in cells}:
        struck = [cell for cell in cells if (cell.mode, cell.purpose, cell.struck) == (mode, purpose, True)]
        assert struck, f"the fault never strikes a {purpose} in {mode}"


def test_matrix_has_hundreds_of_cells() -> None:
    assert len(KINDS) * len(Moment) * len(Policy) > 500
    assert not set(PUSH_ONLY) - set(KINDS)


@pytest.mark.parametrize(
    ("kind", "moment", "policy", "ended"),
    [
        ("nothing", Moment.STRANGERS, Policy.FAIL, "text"),
        ("withdraw", Moment.WAITING, Policy.FAIL, "error"),
        ("withdraw", Moment.WAITING, Policy.RECOMPUTE, "text"),
        ("cancel", Moment.HALF, Policy.RECOMPUTE, "error"),
        ("receiver killed", Moment.HALF, Policy.RECOMPUTE, "died"),
        (*LATE_WRITE, Policy.RECOMPUTE, "text"),
    ],
)
def test_client_sees_what_the_policy_says(kind: str, moment: Moment, policy: Policy, ended: str) -> None:
    assert try_cell(kind, moment, policy).ended == ended


def test_failure_is_told_at_once_while_the_blocks_are_still_in_reach() -> None:
    cell = try_cell(*LATE_WRITE, Policy.FAIL)
    assert cell.struck
    assert cell.took_ms < 600


@pytest.mark.parametrize("moment", [Moment.ASKING, Moment.WRITING])
def test_earlier_turn_that_does_not_come_is_computed_though_the_policy_is_fail(moment: Moment) -> None:
    cell = try_cell("sender killed", moment, Policy.FAIL, purpose=Purpose.CONVERSATION)
    assert (cell.struck, cell.ended, cell.survived) == (True, "text", True)


@pytest.mark.parametrize("policy", Policy)
def test_matrix_notices_blocks_that_are_used_again_too_early(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECEIVER, (Recv.ACCEPTED, RecvInput.PEER_LOST), (Recv.RETIRED, (RecvAction.RETIRE,)))
    cell = try_cell(*LATE_WRITE, policy)
    assert cell.wrong > 0
    assert not sums([cell]).is_good


@pytest.mark.parametrize("policy", Policy)
def test_matrix_notices_blocks_that_are_used_again_under_a_read(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECEIVER, (Recv.READING, RecvInput.PEER_LOST), (Recv.RETIRED, (RecvAction.RETIRE,)))
    cell = try_cell("sender hung, write late", Moment.WRITING, policy, Mode.PULL)
    assert cell.wrong > 0


def test_matrix_notices_what_was_read_of_blocks_that_others_have_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """R6 broken: what was read is believed without a confirmation."""
    monkeypatch.setitem(RECEIVER, (Recv.READING, RecvInput.READ), (Recv.RETIRED, (RecvAction.RETIRE,)))
    monkeypatch.setattr(Receiving, "ending", (Outcome.DELIVERED, Reason.OK, ""))
    cells = run_matrix(["heartbeats lost", "silence, write late"], [Mode.PULL])
    assert sum(cell.wrong for cell in cells) > 0


def test_matrix_notices_an_earlier_turn_whose_blocks_were_taken_back_under_a_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R6 broken on the way back: what was read is believed, and the keeper does not hear of its reader any more."""
    monkeypatch.setitem(RECEIVER, (Recv.READING, RecvInput.READ), (Recv.RETIRED, (RecvAction.RETIRE,)))
    monkeypatch.setattr(Receiving, "ending", (Outcome.DELIVERED, Reason.OK, ""))
    cells = run_matrix(["heartbeats lost", "silence, write late"], [Mode.PULL], [Purpose.CONVERSATION])
    assert sum(cell.wrong for cell in cells) > 0


def test_matrix_notices_a_block_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = Cache.give_back
    monkeypatch.setattr(Cache, "give_back", lambda self, blocks: give_back(self, list(blocks)[1:]))
    assert try_cell("nothing", Moment.HALF, Policy.FAIL).leaked > 0


def test_matrix_notices_a_request_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "notice_received", lambda *_: None)
    cell = try_cell("hints lost", Moment.STRANGERS, Policy.FAIL)
    assert "not within" in cell.problem or "not delivered" in cell.problem
    assert not cell.survived


def test_command_prints_the_sums_last_and_writes_every_cell(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    result = CliRunner().invoke(app, ["bench", "faults", "--kind", "link cut", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith("43 cells tried, 43 survived, 0 leaked, 0 wrong")
    assert len(json.loads(path.read_bytes())) == 43


def test_command_ends_with_status_1_when_a_cell_is_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECEIVER, (Recv.ACCEPTED, RecvInput.PEER_LOST), (Recv.RETIRED, (RecvAction.RETIRE,)))
    result = CliRunner().invoke(app, ["bench", "faults", "--kind", LATE_WRITE[0]])
    assert result.exit_code == 1
    assert "0 wrong" not in result.output


def test_command_names_a_kind_that_there_is_not() -> None:
    result = CliRunner().invoke(app, ["bench", "faults", "--kind", "meteor"])
    assert result.exit_code != 0
    assert "'meteor' is no kind of fault" in str(result.exception)
