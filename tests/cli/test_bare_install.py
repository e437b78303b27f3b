"""kvpush without vLLM, torch or NIXL: a folder that holds only what `pip install kvpush` would bring."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvpush

SOURCE = Path(kvpush.__file__).parents[1]


def closure(requirements: list[str]) -> set[str]:
    """Names of all distributions that `requirements` bring with them."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        one = waiting.pop()
        if one.name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(one.name)
        waiting += [Requirement(line) for line in metadata.requires(one.name) or []]
    return found


@pytest.fixture(scope="module")
def bare_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to those distributions and nothing else."""
    site = tmp_path_factory.mktemp("site")
    for name in closure([line for line in metadata.requires("kvpush") or [] if "extra ==" not in line]):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return site


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{site}", "COLUMNS": "200"}
    command = [sys.executable, "-S", "-m", "kvpush.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_bare_install_has_no_vllm(bare_site: Path) -> None:
    names = {path.name for path in bare_site.iterdir()}
    assert not names & {"vllm", "torch", "nixl", "transformers"}


@pytest.mark.parametrize("command", ["", "up", "router", "models", "doctor", "demo", "bench", "bench compare"])
def test_help_works(bare_site: Path, command: str) -> None:
    shown = run(bare_site, *command.split(), "--help")
    assert shown.returncode == 0, shown.stderr
    assert "Usage: " in shown.stdout
    assert all(line.strip() for line in re.findall(r"^  (?:--\S+)(.*)$", shown.stdout, re.MULTILINE)), "all explained"


def test_version_is_printed(bare_site: Path) -> None:
    assert run(bare_site, "--version").stdout == f"kvpush {kvpush.__version__}\n"


def test_doctor_names_what_is_missing_and_what_to_do(bare_site: Path) -> None:
    shown = run(bare_site, "doctor")
    assert shown.returncode == 1, shown.stdout + shown.stderr
    for name in ("vllm", "nixl"):
        assert re.search(rf"^broken +{name} +not installed\n +-> pip install", shown.stdout, re.MULTILINE), shown.stdout
    assert re.search(r"^ok +python", shown.stdout, re.MULTILINE)


def test_making_a_model_says_which_package_it_needs(bare_site: Path, tmp_path: Path) -> None:
    shown = run(bare_site, "models", "tiny")
    assert shown.returncode in (0, 2)
    if shown.returncode == 2:
        assert "needs the package torch" in shown.stderr
        assert "Traceback" not in shown.stderr


def test_router_starts_its_checks_without_vllm(bare_site: Path) -> None:
    shown = run(bare_site, "router", "--decode", "http://127.0.0.1:1", "--connector", "kvpush")
    assert shown.returncode == 2
    assert "prefill" in shown.stderr
    assert "Traceback" not in shown.stderr
