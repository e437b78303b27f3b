"""Runs one command so that nothing of it outlives the launcher: `python -m kvpush.cli.guardian GRACE_S COMMAND...`.

The launcher holds the other end of our stdin. When that closes, on purpose or because the launcher was killed,
or on SIGTERM, the command gets SIGTERM, GRACE_S seconds later SIGKILL, and so does every process it left behind:
we are their reaper, so none can slip away by outliving its parent. Exits with the command's status.
"""

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    """Run `argv[1:]` with a grace of `argv[0]` seconds; returns its exit status (128 + n for signal n)."""
    grace_s, command = float(argv[0]), argv[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stop, _writer = _stop_signals()
    guardian = os.getpid()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _die_with(guardian),
    )
    _wait_for_end(child, stop)
    _end(child, grace_s)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with(guardian: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:  # it died between fork and prctl
        os._exit(1)


def _stop_signals() -> tuple[socket.socket, socket.socket]:
    """A socket that becomes readable when we are asked to stop, and its other end, to be kept."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return reader, writer


def _wait_for_end(child: subprocess.Popen[bytes], stop: socket.socket) -> None:
    """Until the command has exited, the launcher's pipe is closed, or a signal came."""
    process = os.pidfd_open(child.pid)
    with selectors.DefaultSelector() as selector:
        for source in (process, 0, stop.fileno()):
            selector.register(source, selectors.EVENT_READ)
        selector.select()
    os.close(process)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Leave nothing of the command: politely for `grace_s`, then by force."""
    deadline = time.monotonic() + grace_s
    _end_command(child, deadline)  # and reap it here, so that its status is not taken with the orphans' below
    _signal_all(_descendants(), signal.SIGTERM)
    psutil.wait_procs(_descendants(), timeout=max(0.0, deadline - time.monotonic()))
    while left := _descendants():
        _signal_all(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=1.0)


def _end_command(child: subprocess.Popen[bytes], deadline: float) -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _descendants() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.is_running() and not _reap(process)]


def _reap(process: psutil.Process) -> bool:
    """Take away an orphan that has ended; True when it is gone."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return False
        os.waitpid(process.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, ChildProcessError):
        pass
    return True


def _signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
