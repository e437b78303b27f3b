"""The module list in docs/architecture.md, from the modules own first lines: `python tests/architecture/modules.py`."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
_HEADING = "## Every module\n"


def module_list() -> str:
    """One line per module, by package."""
    source = ROOT / "src" / "kvpush"
    lines: list[str] = []
    for package in ("core", "transport", "runtime", "vllm", "router", "sim", "bench", "cli"):
        lines += ["", f"**{package}**: {_first_line(source / package / '__init__.py')}", ""]
        files = sorted(path for path in (source / package).rglob("*.py") if path.name != "__init__.py")
        lines += [f"- `{path.relative_to(source)}`: {_first_line(path)}" for path in files]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    head, heading, _ = PAGE.read_text().partition(_HEADING)
    return head + heading + module_list()


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(page())
