"""Between the engine's threads and the transfer thread: commands in, events out, microseconds.

Both queues are `deque`s, whose `append`, `extend` and `popleft` are atomic, so nobody holds a lock while the
other side wants it: an engine thread can never wait for the transfer thread here. The one system call is a
write to an eventfd, made only when the transfer thread is asleep or about to be.

No wake-up is lost: the transfer thread says that it is going to sleep *before* it looks at the queue a last
time, and a submitter fills the queue *before* it looks whether the thread sleeps.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from kvpush.core.commands import Command
from kvpush.core.events import Counted, Event, PeerChanged

EVENT_BACKLOG = 100_000
"""Undrained events beyond which those that nothing depends on (`Counted`, `PeerChanged`) are dropped: an engine
that never drains must not let a peer's garbage fill its memory."""


DRAIN_LIMIT = 10_000
"""So that a hook which drains ends, however fast events come."""


class Mailbox:
    """Commands for the transfer thread and its events. Methods may be called from any thread, unless they say so."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._events: deque[Event] = deque()
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._closed = False

    # the engine's side --------------------------------------------------------------------------------
    def submit(self, commands: Iterable[Command]) -> None:
        """Add `commands` in order and wake the transfer thread if it sleeps."""
        self._commands.extend(list(commands))
        if self._asleep:
            self._asleep = False
            self._wake()

    def drain(self) -> list[Event]:
        """Take the events published so far, in order; at most `DRAIN_LIMIT`, the rest is for the next call."""
        drained: list[Event] = []
        if not self._events:
            return drained
        with suppress(IndexError):  # another thread may drain at the same time
            while len(drained) < DRAIN_LIMIT:
                drained.append(self._events.popleft())
        return drained

    # the transfer thread's side -----------------------------------------------------------------------
    @property
    def wake_fd(self) -> int:
        """Readable once a command has been submitted to a thread that sleeps."""
        return self._wake_fd

    def take(self, limit: int) -> list[Command]:
        """Take at most `limit` commands. Transfer thread only."""
        return [self._commands.popleft() for _ in range(min(limit, len(self._commands)))]

    def publish(self, events: Iterable[Event]) -> None:
        """Add events for the engine."""
        if len(self._events) > EVENT_BACKLOG:
            events = [event for event in events if not isinstance(event, Counted | PeerChanged)]
        self._events.extend(events)

    def fall_asleep(self) -> bool:
        """Announce that the thread is about to sleep; False when it must not, commands have come."""
        self._asleep = True
        if self._commands:
            self._asleep = False
        return self._asleep

    def wake_up(self) -> None:
        """The thread is awake again: submitters need not wake it."""
        self._asleep = False
        with suppress(BlockingIOError):  # something else has woken us
            os.eventfd_read(self._wake_fd)

    def close(self) -> None:
        """Release the eventfd; only when the transfer thread has ended. Idempotent. Queues stay usable."""
        with self._wake_lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake_fd)

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)
