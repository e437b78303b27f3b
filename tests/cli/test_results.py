"""A command that cannot write its result must say so before it measures for minutes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpush.cli.bench import bench_app
from kvpush.core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "problem"),
    [("missing/report", "No such file or directory"), (".", "Is a directory"), ("/proc/version", "cannot be written")],
)
@pytest.mark.parametrize("option", ["compare --html", "compare --trace", "micro --json", "soak --json"])
def test_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, option: str, name: str, problem: str) -> None:
    command, flag = option.split()

    with pytest.raises(ConfigError, match=problem) as refused:
        CliRunner().invoke(bench_app, [command, flag, str(tmp_path / name)], catch_exceptions=False)

    assert refused.value.field == flag.removeprefix("--")


def test_file_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    there, new = tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("before")

    for path in (there, new):
        CliRunner().invoke(bench_app, ["soak", "--minutes", "0", "--json", str(path)])

    assert there.read_text() == "before"
    assert not new.exists()
