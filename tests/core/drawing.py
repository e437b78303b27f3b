"""Draws the state tables into docs/protocol.md: run this file after changing a table."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from kvpush.core.tables import RECEIVER, SENDER

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
STATE = TypeVar("STATE", bound=StrEnum)
INPUT = TypeVar("INPUT", bound=StrEnum)
ACTION = TypeVar("ACTION", bound=StrEnum)


def drawn(text: str) -> str:
    """The document with its drawings made anew."""
    for name, drawing in (("sender", draw(SENDER)), ("receiver", draw(RECEIVER))):
        begin, end = f"<!-- {name}: drawn from core/tables.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{drawing}{end}{after}"
    return text


def draw(table: Mapping[tuple[STATE, INPUT], tuple[STATE, tuple[ACTION, ...]]]) -> str:
    """A diagram of the transitions from state to state, and the whole table."""
    moves: dict[tuple[STATE, STATE], list[str]] = {}
    for (state, happened), (after, _) in table.items():
        if state is not after:
            moves.setdefault((state, after), []).append(happened)
    arrows = "".join(f"    {a} --> {b}: {', '.join(names)}\n" for (a, b), names in moves.items())
    rows = "".join(_row(state, happened, after, actions) for (state, happened), (after, actions) in table.items())
    heading = "| state | input | next state | actions |\n|---|---|---|---|\n"
    return f"```mermaid\nstateDiagram-v2\n    [*] --> new\n{arrows}    retired --> [*]\n```\n\n{heading}{rows}"


def _row(state: StrEnum, happened: StrEnum, after: StrEnum, actions: Iterable[StrEnum]) -> str:
    return f"| {state} | {happened} | {after} | {', '.join(actions)} |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(drawn(DOCUMENT.read_text()))
