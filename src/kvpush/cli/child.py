"""One child process of a cluster: started under a guardian, its output in a log file, ended with all it started."""

import os
import subprocess
import sys
from pathlib import Path

from kvpush.cli.parts import Command
from kvpush.core.errors import KVPushError

GRACE_S = 10.0
"""How long a part may take to end by itself before it is killed."""


class PartDied(KVPushError):
    """A part of the cluster ended by itself; `tail` is the end of what it logged."""

    def __init__(self, name: str, status: int, log: Path, tail: str) -> None:
        super().__init__(f"{name} ended with status {status}; the last lines of {log}:\n{tail}")
        self.name = name
        self.status = status
        self.log = log
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
            raise PartDied(self.name, status, self.log, self.tail())

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 200 * lines))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def ask_to_stop(self) -> None:
        """Begin to stop; returns at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        """Stop it and wait until nothing of it is left (at most `GRACE_S` and a moment)."""
        self.ask_to_stop()
        self._process.wait()
