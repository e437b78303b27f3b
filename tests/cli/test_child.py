import sys
from pathlib import Path

import pytest
from cli.processes import wait_until

from kvpush.cli.child import Child, PartDied
from kvpush.cli.parts import Command

FAILS = """
print("(Worker pid=7) INFO 11-30 18:32:26 [x.py:10] no Error: here, only talk of one")
print("(Worker pid=7) ERROR 11-30 18:32:26 [x.py:1063] ValueError: the cause")
print("RuntimeError: its echo in another process")
raise SystemExit(3)
"""


def child(script: str, log: Path, **env: str) -> Child:
    return Child("engine", Command((sys.executable, "-c", script), env), log)


def died(part: Child) -> PartDied:
    caught: list[PartDied] = []

    def has_died() -> bool:
        try:
            part.check()
        except PartDied as error:
            caught.append(error)
        return bool(caught)

    wait_until(has_died)
    return caught[0]


def test_part_that_dies_is_reported_with_its_cause_and_its_last_lines(tmp_path: Path) -> None:
    part = child(FAILS, tmp_path / "log")
    error = died(part)
    part.stop()
    assert (error.name, error.status, error.cause) == ("engine", 3, "ValueError: the cause")
    assert error.tail.endswith("RuntimeError: its echo in another process")
    assert str(tmp_path / "log") in str(error)


def test_part_that_dies_without_a_word_is_reported_with_its_status(tmp_path: Path) -> None:
    part = child("raise SystemExit(4)", tmp_path / "log")
    error = died(part)
    part.stop()
    assert (error.status, error.cause, error.tail) == (4, "", "")


def test_log_of_many_brackets_is_searched_in_no_time(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("(a)[b]" * 50_000 + "\nKeyError: 'x'\n")
    part = child("", tmp_path / "log")
    assert part.first_error() == "KeyError: 'x'"
    part.stop()


def test_cause_is_looked_for_at_the_end_of_the_log_and_noise_is_left_out_of_the_tail(tmp_path: Path) -> None:
    noise = 'nanobind: leaked 2 functions!\n - leaked function "f"\n - ... skipped remainder\n'
    (tmp_path / "log").write_text("KeyError: 'survived'\n" + "a line\n" * 50_000 + "OSError: the cause\n" + noise * 20)
    part = child("", tmp_path / "log")
    assert part.first_error() == "OSError: the cause"
    assert part.tail(2).splitlines() == ["a line", "OSError: the cause"]
    part.stop()


def test_part_that_runs_is_not_reported_and_can_be_stopped_twice(tmp_path: Path) -> None:
    part = child("import os, signal; print(os.environ['WHO'], flush=True); signal.pause()", tmp_path / "log", WHO="me")
    wait_until(lambda: part.tail() == "me")
    part.check()
    part.stop()
    part.stop()
    with pytest.raises(PartDied):
        part.check()
