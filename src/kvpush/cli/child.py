"""One child process of a cluster: started under a guardian, its output in a log file, ended with all it started."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kvpush.cli.parts import Command
from kvpush.core.errors import KVPushError

GRACE_S = 10.0
"""How long a part may take to end by itself before it is killed."""


_PREFIX = r"(?:\([^()]*\)|ERROR|[\d\-:., ]|\[[^\]]*\])*"  # process, level, time and place, as vLLM logs them
_ERROR_LINE = re.compile(rf"^{_PREFIX}((?:\w+\.)*\w*(?:Error|Exception|Refused)\b: .+)$", re.MULTILINE)
_LAST_BYTES = 256 << 10  # of a log are searched for an error: what was survived long ago is not the cause
_TAIL_BYTES = 64 << 10
_NOISE = re.compile(r"nanobind: | - leaked | - \.\.\. skipped")  # what libraries say at any end of a process


class PartDied(KVPushError):
    """A part of the cluster ended by itself.

    `cause` is the first exception in the last part of its log, "" without one: what comes later is often only its echo
    in other processes. `tail` is the end of the log.
    """

    def __init__(self, name: str, status: int, log: Path, cause: str, tail: str) -> None:
        because = f": {cause}" if cause else ""
        super().__init__(f"{name} ended with status {status}{because}\nthe last lines of {log}:\n{tail}")
        self.name = name
        self.status = status
        self.log = log
        self.cause = cause
        self.tail = tail


class Child:
    """Owned by one thread. `stop` may be called at any time and more than once."""

    def __init__(self, name: str, command: Command, log: Path) -> None:
        """Start `command`, its output appended to `log`."""
        self.name = name
        self.log = log
        guardian = (sys.executable, "-m", "kvpush.cli.guardian", str(GRACE_S))
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                (*guardian, *command.argv),
                stdin=subprocess.PIPE,  # its end of file is the order to stop, also when we are killed
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **command.env},
                start_new_session=True,  # the terminal's Ctrl-C is ours to pass on
            )

    @property
    def pid(self) -> int:
        """The guardian's process id; all processes of the part descend from it."""
        return self._process.pid

    def check(self) -> None:
        """Raise `PartDied` if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise PartDied(self.name, status, self.log, self.first_error(), self.tail())

    def first_error(self) -> str:
        """The first exception that the end of the log names, without what loggers put before it; "" if none."""
        found = _ERROR_LINE.search(self._end(_LAST_BYTES))
        return found[1] if found else ""

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log that say something."""
        said = [line for line in self._end(_TAIL_BYTES).splitlines() if not _NOISE.match(line)]
        return "\n".join(said[-lines:])

    def _end(self, nbytes: int) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - nbytes))
            return file.read().decode(errors="replace")

    def ask_to_stop(self) -> None:
        """Begin to stop; returns at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        """Stop it and wait until nothing of it is left (at most `GRACE_S` and a moment)."""
        self.ask_to_stop()
        self._process.wait()
