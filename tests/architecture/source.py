"""The project's own source, read as syntax trees: what the architecture tests ask about."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


@dataclass(frozen=True)
class Import:
    """One imported module; `at_start` is False inside a function, where it is only paid for when called."""

    module: str
    line: int
    at_start: bool


@dataclass(frozen=True)
class Source:
    path: Path

    @property
    def name(self) -> str:
        """Its path from the root, for messages."""
        return str(self.path.relative_to(ROOT))

    @property
    def module(self) -> str:
        """Its dotted name, as `kvpush.core.ids`."""
        parts = self.path.relative_to(SRC).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def layer(self) -> str:
        """The package under kvpush that it belongs to, "" for kvpush itself."""
        parts = self.path.relative_to(SRC).parts
        return parts[1] if len(parts) > 2 else ""

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self.tree, at_start=True))

    def calls(self) -> Iterator[tuple[str, int]]:
        """The dotted name and line of each call by a plain or dotted name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node.lineno


def _imports(node: ast.AST, *, at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, at_start)
        elif _is_type_checking(child):
            continue
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, at_start=at_start and not inside)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def library() -> list[Source]:
    """Every module of the package."""
    return [Source(path) for path in sorted((SRC / "kvpush").rglob("*.py"))]


def suite() -> list[Source]:
    """Every module of the tests."""
    return [Source(path) for path in sorted((ROOT / "tests").rglob("*.py"))]
