"""The folder that models are kept in, and how one gets there: whole or not at all."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """`$KVPUSH_CACHE`, else `kvpush` in the XDG cache folder. Not created here."""
    if own := os.environ.get("KVPUSH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvpush"


def ensure_folder(target: Path, fill: Callable[[Path], None]) -> bool:
    """Make `target` with `fill`, unless it is there; returns whether it had to be made.

    `fill` gets an empty folder that becomes `target` by one rename, so that a process that dies leaves
    no half model. A second process that wants the same folder waits for the first.
    """
    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return False
        _fill_and_rename(target, fill)
    return True


def _fill_and_rename(target: Path, fill: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fill(scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
