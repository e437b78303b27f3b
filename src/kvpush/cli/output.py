"""Where the commands write, and how they show a cluster that starts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpush.cli.cluster import Observer, PartStatus

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

_QUIET_S = 15.0  # how often a log without a terminal hears of a part that is still starting


@contextmanager
def starting() -> Iterator[Observer]:
    """Show parts as they start: a table that refreshes on a terminal, a line per change elsewhere."""
    if not console.is_terminal:
        yield _LineReport().show
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield lambda statuses: live.update(_table(statuses))


def _table(statuses: tuple[PartStatus, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    for status in statuses:
        state = Text("ready", "green") if status.is_ready else Text("starting", "yellow")
        detail = "" if status.is_ready else status.last_line[: max(0, console.width - 40)]
        table.add_row(status.name, state, f"{status.seconds:5.1f} s", Text(detail, "dim"))
    return table


class _LineReport:
    def __init__(self) -> None:
        self._ready: set[str] = set()
        self._last = time.monotonic()

    def show(self, statuses: tuple[PartStatus, ...]) -> None:
        for status in statuses:
            if status.is_ready and status.name not in self._ready:
                self._ready.add(status.name)
                console.print(f"{status.name} ready after {status.seconds:.1f} s")
        waiting = [status for status in statuses if not status.is_ready]
        if waiting and time.monotonic() - self._last > _QUIET_S:
            self._last = time.monotonic()
            console.print(f"starting for {waiting[0].seconds:.0f} s: {', '.join(status.name for status in waiting)}")
