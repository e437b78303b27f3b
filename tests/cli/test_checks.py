import sys
from pathlib import Path

import pytest

from kvpush.cli import checks
from kvpush.cli.checks import CHECKS, Finding, Verdict, run_check


def pretend_installed(site: Path, name: str, version: str) -> None:
    """Put the metadata of a distribution where importlib finds it first."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("0.31.9", Verdict.BROKEN),
        ("0.32.0", Verdict.OK),
        ("0.33.1+cu129", Verdict.OK),
        ("0.33.0rc1", Verdict.OK),
        ("0.34.0", Verdict.BROKEN),
        ("1.0", Verdict.BROKEN),
    ],
)
def test_vllm_must_be_of_a_supported_version(site: Path, version: str, verdict: Verdict) -> None:
    pretend_installed(site, "vllm", version)
    finding = checks.check_vllm()
    assert (finding.verdict, finding.found) == (verdict, f"vllm {version}")
    assert finding.remedy == ("pip install 'vllm>=0.32,<0.34'." if verdict is Verdict.BROKEN else "")


def test_nixl_that_is_too_old_is_not_even_started(site: Path) -> None:
    pretend_installed(site, "nixl", "1.4.2")
    assert checks.check_nixl() == Finding("nixl", Verdict.BROKEN, "1.4.2", "pip install 'nixl>=1.5'.")


def test_plugin_left_out_by_the_environment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_plugin().verdict is Verdict.OK
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert checks.check_plugin().remedy == "Add kvpush to VLLM_PLUGINS."
    monkeypatch.setenv("VLLM_PLUGINS", "another,kvpush")
    assert checks.check_plugin().verdict is Verdict.OK


def test_cache_that_cannot_be_written_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_CACHE", "/proc/kvpush")
    assert checks.check_disk().remedy == "Set KVPUSH_CACHE to another folder."
    monkeypatch.setenv("KVPUSH_CACHE", str(tmp_path / "a" / "b"))
    assert checks.check_disk().verdict is not Verdict.BROKEN


def test_check_that_fails_is_a_finding() -> None:
    def check_stars() -> Finding:
        raise OSError("no telescope")

    finding = run_check(check_stars)
    assert (finding.name, finding.verdict, finding.found) == ("stars", Verdict.BROKEN, "OSError: no telescope")


def test_every_broken_thing_comes_with_a_remedy() -> None:
    for check in CHECKS:
        finding = run_check(check)
        assert finding.remedy or finding.verdict is Verdict.OK, finding
