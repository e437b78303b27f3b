"""Engine processes, forked from one that has imported vLLM: importing takes longer than all else about a small engine.

They are daemons of this process: none outlives it, and each should end when its line is closed.
"""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

Config = TypeVar("Config")

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler, worker and connector in one process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_IMPORTED = [
    "kvpush.sim.obedient",
    "vllm.model_executor.models.llama",
    "vllm.v1.structured_output",
    "vllm.v1.worker.cpu_worker",
]
_KILLED_S = 30.0


class Forked:
    """One process, and the `line` to it. Owned by one thread."""

    def __init__(self, serve: Callable[[Config, Connection], None], config: Config, log: Path) -> None:
        """Start a process that calls `serve`, a function of a module, and appends what it has to say to `log`."""
        context = multiprocessing.get_context("forkserver")
        with _environment():  # that of the process they are forked from is theirs
            context.set_forkserver_preload(_IMPORTED)
            forkserver.ensure_running()
        self.line, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=_live, args=(serve, config, log, theirs), daemon=True)
            self._process.start()

    @property
    def status(self) -> int | None:
        """How the process has ended, as `multiprocessing` says it; None while it runs."""
        return self._process.exitcode

    def ended(self, seconds: float) -> bool:
        """Whether the process has ended, after waiting at most so long for it."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def kill(self) -> None:
        """End the process at once, without a word, and close the line."""
        self._process.kill()
        self._process.join(_KILLED_S)
        self.line.close()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name in _ENVIRONMENT.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _live(serve: Callable[[Config, Connection], None], config: Config, log: Path, line: Connection) -> None:
    """Be the process; never returns. That nobody is on the line any more is an order to end."""
    status = 1
    try:
        _write_to(log)
        with contextlib.suppress(EOFError, BrokenPipeError):
            serve(config, line)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _write_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
