"""Waiting for conditions, and what a process must not have more of after a test."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvpush.core.ids import Address, LinkId
from kvpush.runtime.control import ControlChannel, FrameArrived, LinkLost, LinkRefused

LOCAL = Address("127.0.0.1", 0)
SECRET = "correct horse battery staple"
DEADLINE_S = 10.0

T = TypeVar("T")


def until(condition: Callable[[], T], within_s: float = DEADLINE_S) -> T:
    """The first true answer of `condition`, asked again and again."""
    deadline = time.monotonic() + within_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.001)
    return answer


def open_fds() -> set[str]:
    """What this process has open, without what it opens to look."""
    fds = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue
    return fds


def native_threads() -> set[str]:
    """Threads of this process, those of C libraries included."""
    return set(os.listdir("/proc/self/task"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """Whatever is started inside has to be gone afterwards: threads of any kind, sockets, files."""
    fds, natives, threads = open_fds(), native_threads(), set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads
    until(lambda: native_threads() <= natives)
    assert open_fds() <= fds


class Party:
    """A control channel and all that has reached it."""

    def __init__(self, channel: ControlChannel) -> None:
        self.channel = channel
        self.frames: list[FrameArrived] = []
        self.lost: list[LinkId] = []
        self.refused: list[LinkId] = []
        self.counted: list[str] = []

    def pump(self) -> None:
        """Take one turn."""
        for arrived in self.channel.receive(64):
            match arrived:
                case FrameArrived():
                    self.frames.append(arrived)
                case LinkLost(link):
                    self.lost.append(link)
                case LinkRefused(link):
                    self.refused.append(link)
        self.counted += [f"{counted.name} {counted.reason}" for counted in self.channel.take_counted()]

    @property
    def received(self) -> list[bytes]:
        return [arrived.frame for arrived in self.frames]


def pump_until(condition: Callable[[], T], *parties: Party, within_s: float = DEADLINE_S) -> T:
    """Let all parties take turns until `condition` is true."""

    def turn() -> T:
        for party in parties:
            party.pump()
        return condition()

    return until(turn, within_s)
