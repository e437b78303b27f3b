"""Looking at real processes from tests."""

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll `condition` until it holds; fail when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.02)


def marked(marker: str) -> list[psutil.Process]:
    """The processes that have `marker` among their arguments or in their environment."""
    return [process for process in psutil.process_iter() if _has(process, marker)]


def _has(process: psutil.Process, marker: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return marker in process.cmdline() or marker in process.environ().values()
    except psutil.Error:
        return False
