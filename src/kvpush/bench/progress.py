"""A progress bar that knows how long things take: its unit is the expected second."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """Advances by expected seconds and says what is being done."""

    def __init__(self, progress: Progress, total_s: float) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total_s)

    def say(self, what: str) -> None:
        """Show what happens now; without a terminal, one line."""
        self._progress.update(self._task, description=what)
        if not self._progress.console.is_terminal:
            done = self._progress.tasks[0].percentage
            self._progress.console.print(f"[{done:3.0f} %] {what}", markup=False, highlight=False)

    def advance(self, seconds: float) -> None:
        """So much of what was expected is done."""
        self._progress.advance(self._task, seconds)


@contextmanager
def progress_bar(console: Console, total_s: float) -> Iterator[Bar]:
    """A bar over `total_s` expected seconds."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bar(progress, total_s)
