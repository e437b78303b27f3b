"""Rules that hold for every file here."""

import ast

from architecture.source import ROOT, library, suite

LIBRARY = library()
MOST_LINES = 400
PRINTING = ("print", "sys.stdout.write", "sys.stderr.write")


def test_file_has_at_most_400_lines() -> None:
    assert not [f"{s.name}: {len(s.lines)}" for s in LIBRARY + suite() if len(s.lines) > MOST_LINES], "split by idea"


def test_module_says_in_its_docstring_what_it_is() -> None:
    assert not [source.name for source in LIBRARY if not ast.get_docstring(source.tree)]


def test_library_does_not_print() -> None:
    """Commands write through `kvpush.cli.output`, everything else through logging."""
    assert not [f"{source.name}:{line}" for source in LIBRARY for name, line in source.calls() if name in PRINTING]


def test_drivers_do_not_assert() -> None:
    """R5: what the network brings may never raise an assertion."""
    protocol = [source for source in LIBRARY if source.layer in ("transport", "runtime")]
    found = [(source, node) for source in protocol for node in ast.walk(source.tree) if isinstance(node, ast.Assert)]
    assert not [f"{source.name}:{node.lineno}" for source, node in found]


def test_project_names_no_place_of_one_machine() -> None:
    """A clone works anywhere: no absolute path of a developer's machine in what is published."""
    published = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "Makefile", *sorted((ROOT / "docs").glob("*.md"))]
    homes = ("/home" + "/", "/root" + "/", "/Users" + "/", "/work" + "/")
    assert not [path.name for path in published if any(home in path.read_text() for home in homes)]
