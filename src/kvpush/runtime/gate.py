"""Between an engine's thread and the mailbox: commands that are true only when the device has come so far.

A forward pass is launched long before it is done, and no engine thread may wait for it. So what it makes final is put
here with an event of the device, and a small thread that does nothing else waits for the event (without polling, and
without the interpreter lock) and passes the commands on. On a device that has no events, what was launched is done,
and the thread is never started.

What is superseded never leaves the gate: a prompt that is complete, retracted or withdrawn takes with it what still
waits here for the same key. So the transfer thread sees each key's commands in their order, and none is held up by
another key's.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvpush.core.commands import Command, Final, Retract, Withdraw
from kvpush.core.ids import Key

logger = logging.getLogger("kvpush.transfer")

_JOIN_S = 1.0


class DeviceEvent(Protocol):
    """A point in the device's work, recorded by the thread that launched it; waited for by any."""

    def query(self) -> bool:
        """Whether the device has come past it."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(eq=False)
class _Waiting:
    event: DeviceEvent
    commands: list[Command]


class Gate:
    """Passes commands on: at once, or after an event. Methods may be called from any thread and never wait, but for
    `close`."""

    def __init__(self, submit: Callable[[Iterable[Command]], None], name: str) -> None:
        """`submit` is called with the gate's lock held, from the caller's or the gate's own thread."""
        self._submit = submit
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, commands: Iterable[Command]) -> None:
        """Pass commands on now. What waits for the same keys is dropped where these supersede it."""
        commands = list(commands)
        with self._changed:
            self._drop({command.key for command in commands if isinstance(command, Final | Retract | Withdraw)})
            if commands:
                self._submit(commands)

    def submit_after(self, event: DeviceEvent | None, commands: Iterable[Command]) -> None:
        """Pass commands on when the device has come past `event`, and whatever was given before has been passed on."""
        with self._changed:
            if not self._waiting and (event is None or event.query()):
                self._submit(commands)
            elif not self._closed:
                self._waiting.append(_Waiting(event or _NO_EVENT, list(commands)))
                self._start()
                self._changed.notify()

    def close(self) -> None:
        """Drop what waits, and end the thread, unless the device keeps it. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _drop(self, keys: set[Key]) -> None:
        if keys:
            for waiting in self._waiting:
                waiting.commands = [command for command in waiting.commands if _key(command) not in keys]

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    # on the thread ------------------------------------------------------------------------------------
    def _run(self) -> None:
        while (waiting := self._next()) is not None:
            try:
                waiting.event.synchronize()
            except Exception:
                logger.exception("The device failed: what it was to compute will not be sent.")
                waiting.commands = []
            with self._changed:
                if self._waiting and self._waiting[0] is waiting:
                    self._waiting.popleft()
                    self._submit(waiting.commands)

    def _next(self) -> _Waiting | None:
        """The first that waits; None when the gate has been closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return self._waiting[0] if self._waiting else None


class _NoEvent:
    """Has always fired."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


_NO_EVENT = _NoEvent()


def _key(command: Command) -> Key | None:
    return getattr(command, "key", None)
