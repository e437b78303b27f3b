"""The whole matrix: all cells, their table, and the sums that decide."""

from collections.abc import Iterable, Sequence
from itertools import product

import msgspec
from rich.table import Table

from kvpush.bench.faults.cells import Cell, try_cell
from kvpush.bench.faults.kinds import KINDS, PUSH_ONLY, Moment
from kvpush.bench.faults.node import Policy
from kvpush.core.events import Purpose
from kvpush.core.mode import Mode


class Sums(msgspec.Struct, frozen=True):
    """Cells in which the fault struck, those that were survived, and what was leaked or wrong in any."""

    tried: int
    survived: int
    leaked: int
    wrong: int

    @property
    def is_good(self) -> bool:
        """Whether everything was survived, and nothing was leaked or wrong."""
        return self.survived == self.tried and not (self.leaked or self.wrong)

    def __str__(self) -> str:
        return f"{self.tried} cells tried, {self.survived} survived, {self.leaked} leaked, {self.wrong} wrong"


_POLICIES = {Purpose.PROMPT: tuple(Policy), Purpose.CONVERSATION: (Policy.FAIL,)}
"""An earlier turn that does not come is computed under either policy: shown under the one that could forbid it."""


def run_matrix(
    kinds: Sequence[str] = tuple(KINDS),
    modes: Sequence[Mode] = tuple(Mode),
    purposes: Sequence[Purpose] = tuple(Purpose),
) -> list[Cell]:
    """Try each kind at each moment under each policy, in each mode and for each purpose in which it can happen."""
    return [
        try_cell(kind, moment, policy, mode, purpose)
        for purpose, mode in product(purposes, modes)
        for kind in kinds
        if mode is Mode.PUSH or kind not in PUSH_ONLY
        for moment in Moment
        if moment.is_of(mode, purpose)
        for policy in _POLICIES[purpose]
    ]


def sums(cells: Iterable[Cell]) -> Sums:
    """Cells in which nothing could strike are not counted, unless something went wrong in them."""
    counted = [cell for cell in cells if cell.struck or not cell.survived]
    return Sums(
        tried=len(counted),
        survived=sum(cell.survived for cell in counted),
        leaked=sum(cell.leaked for cell in counted),
        wrong=sum(cell.wrong for cell in counted),
    )


def table(cells: Iterable[Cell], mode: Mode, purpose: Purpose) -> Table:
    """The cells of one mode and purpose. A row per kind, a column per moment: what the client sees under each policy,
    and after how many milliseconds; - where the fault cannot strike."""
    by_place: dict[tuple[str, Moment], list[Cell]] = {}
    for cell in [cell for cell in cells if (cell.mode, cell.purpose) == (mode, purpose)]:
        by_place.setdefault((cell.kind, cell.moment), []).append(cell)
    moments = [moment for moment in Moment if moment.is_of(mode, purpose)]
    policies = " / ".join(f"under {policy}" for policy in _POLICIES[purpose])
    made = Table("fault", *moments, title=f"{purpose}, {mode}: {policies}, milliseconds of virtual time")
    for kind in dict.fromkeys(kind for kind, _ in by_place):
        made.add_row(kind, *(_shown(by_place.get((kind, moment), [])) for moment in moments))
    return made


def _shown(cells: list[Cell]) -> str:
    failed = next((cell for cell in cells if not cell.survived), None)
    if failed:
        return f"[red]{failed.problem or f'leaked {failed.leaked}, wrong {failed.wrong}'}[/red]"
    if not any(cell.struck for cell in cells):
        return "-"
    endings = dict.fromkeys(cell.ended for cell in cells)
    return f"{'/'.join(endings)} {max(cell.took_ms for cell in cells):.0f}"
