"""Forks engine processes from one that has imported vLLM: imports take longer than all else about a small engine.

Run as `python -m engines.nursery FD`, with a connected Unix socket as file descriptor FD. Each byte that arrives there
brings two descriptors, of a socket for the engine's calls and of its log, and is answered by the process id of a new
engine process. The nursery ends when the socket is closed, and its engines when theirs are.
"""

import atexit
import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(_TESTS),
}
_PID_BYTES = 8


class Nursery:
    """The test's side: bears engine processes."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engines.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
            )

    def bear(self, calls: socket.socket, log: int) -> "Child":
        """A new process that serves an engine on `calls` and writes what it has to say to `log`."""
        socket.send_fds(self._socket, [b"1"], [calls.fileno(), log])
        return Child(int.from_bytes(self._socket.recv(_PID_BYTES), "little"))

    def close(self) -> None:
        """End the nursery; its engines end when their sockets are closed."""
        self._socket.close()
        self._process.wait()


class Child:
    """A process that is not ours to wait for, but to watch and to kill."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)

    def ended(self, seconds: float) -> bool:
        """Whether the process has ended, after waiting at most so long for it."""
        return self._handle is None or bool(select.select([self._handle], [], [], seconds)[0])

    def kill(self) -> None:
        """End the process at once, and forget it."""
        if self._handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self.ended(30.0)
        os.close(self._handle)
        self._handle = None


@functools.cache
def nursery() -> Nursery:
    """The nursery of this test process; made when the first engine is."""
    made = Nursery()
    atexit.register(made.close)
    return made


# in the nursery's process -------------------------------------------------------------------------------
def main() -> None:
    """Import, then fork on demand."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    _import_vllm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended engines need no burial
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1, 2)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            _live(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(pid.to_bytes(_PID_BYTES, "little"))


def _import_vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.model_executor.models.llama
        import vllm.v1.engine.llm_engine
        import vllm.v1.structured_output
        import vllm.v1.worker.cpu_worker  # noqa: F401


def _live(calls: int, log: int) -> None:
    """Be an engine process, and never return."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        from engines.child import serve

        serve(Connection(calls))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
