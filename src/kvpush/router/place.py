"""Where router processes on one port meet: sockets in a folder that only this user can open."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec


class Place(msgspec.Struct, frozen=True):
    """One process's place among `workers`. One that is alone needs no folder."""

    folder: str = ""
    number: int = 0
    workers: int = 1

    @property
    def others(self) -> tuple[int, ...]:
        """The numbers of all but this one."""
        return tuple(number for number in range(self.workers) if number != self.number)

    @property
    def is_first(self) -> bool:
        """Whether it is this process that does what one must do for all."""
        return self.number == 0

    def turns(self, number: int) -> str:
        """The socket on which a worker hears of turns of conversations (siblings.py)."""
        return str(Path(self.folder, f"{number}.turns"))

    def questions(self, number: int) -> str:
        """The socket on which a worker answers the others (others.py)."""
        return str(Path(self.folder, f"{number}.questions"))


@contextmanager
def meeting_places(workers: int) -> Iterator[list[Place]]:
    """The places of so many workers, while this block lasts."""
    with tempfile.TemporaryDirectory(prefix="kvpush-router-") as folder:
        yield [Place(folder, number, workers) for number in range(workers)]
