import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from uuid import uuid4

import psutil
import pytest
from cli.processes import marked, wait_until

WAITS = "import signal; print('ready', flush=True); signal.pause()"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
HAS_ESCAPED_CHILD = f"""
import subprocess, sys, signal
subprocess.Popen([sys.executable, "-c", {IGNORES_SIGTERM!r}, sys.argv[1]], start_new_session=True)
signal.pause()
"""
DIES_LEAVING_A_CHILD = f"""
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", {WAITS!r}, sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE
)
child.stdout.readline()
sys.exit(7)
"""
LAUNCHER = """
import signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
signal.pause()
"""


def guardian(script: str, marker: str, grace_s: float = 0.3) -> list[str]:
    return [sys.executable, "-m", "kvpush.cli.guardian", str(grace_s), sys.executable, "-c", script, marker]


@pytest.fixture
def marker() -> Iterator[str]:
    name = f"kvpush-test-{uuid4().hex}"
    yield name
    for process in marked(name):
        process.kill()


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def start_until_ready(command: list[str]) -> subprocess.Popen[bytes]:
    """Return when the command, or the last one of its children, has done all it does before it waits."""
    process = start(command)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def stop(process: subprocess.Popen[bytes]) -> int:
    """Close the guardian's input; returns its status."""
    process.communicate(timeout=60)
    return process.returncode


def test_guardian_returns_the_status_of_its_command(marker: str) -> None:
    process = start(guardian("import sys; sys.exit(7)", marker))
    assert process.wait(60) == 7
    stop(process)


def test_guardian_ends_command_when_its_input_closes(marker: str) -> None:
    process = start_until_ready(guardian(WAITS, marker, grace_s=60))
    assert stop(process) == 128 + signal.SIGTERM
    assert not marked(marker)


def test_guardian_kills_command_that_ignores_sigterm_after_grace(marker: str) -> None:
    process = start_until_ready(guardian(IGNORES_SIGTERM, marker))
    assert stop(process) == 128 + signal.SIGKILL
    assert not marked(marker)


def test_guardian_kills_grandchild_in_a_session_of_its_own(marker: str) -> None:
    process = start_until_ready(guardian(HAS_ESCAPED_CHILD, marker))
    assert len(marked(marker)) == 3
    stop(process)
    assert not marked(marker)


def test_guardian_leaves_no_orphan_when_command_ends_by_itself(marker: str) -> None:
    process = start(guardian(DIES_LEAVING_A_CHILD, marker))
    assert process.wait(60) == 7
    assert not marked(marker)
    stop(process)


def test_guardian_ends_command_on_sigterm(marker: str) -> None:
    process = start_until_ready(guardian(WAITS, marker))
    process.terminate()
    process.wait(60)
    assert not marked(marker)
    stop(process)


def test_nothing_is_left_when_launcher_is_killed(marker: str) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, *guardian(HAS_ESCAPED_CHILD, marker)])
    wait_until(lambda: len(marked(marker)) == 4)
    launcher.kill()
    launcher.wait(60)
    wait_until(lambda: not marked(marker))


def test_command_does_not_outlive_a_killed_guardian(marker: str) -> None:
    process = start_until_ready(guardian(WAITS, marker))
    child = psutil.Process(process.pid).children()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    stop(process)
