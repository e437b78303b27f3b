"""The whole comparison, from its command line: real engines, router, connector and NIXL on the `ci` device."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

COMMAND = (
    *(sys.executable, "-m", "kvpush.cli", "bench", "compare"),
    *("--connectors", "kvpush:push", "--device", "sim:ci", "--input", "40,300", "--output", "8"),
    *("--concurrency", "1,4", "--requests", "8", "--rounds", "1", "--verify", "--fragmented"),
    *("--kv-gib", "0.125"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one run has written all that it can write."""
    folder = tmp_path_factory.mktemp("compare")
    files = [f"--{kind}={folder / kind}" for kind in ("json", "html", "trace")]
    done = subprocess.run(
        [*COMMAND, *files, "--log-dir", str(folder / "logs")], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "SIMULATED" in done.stdout
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "json").read_text())
    return loaded


def test_every_request_is_answered_through_a_transfer_with_the_right_text(report: dict[str, Any]) -> None:
    samples = report["samples"]
    assert len(samples) == 2 * 2 * 8
    assert {sample["text"] for sample in samples} == {"right"}
    assert {sample["path"] for sample in samples} == {"pd"}
    assert all(sample["nbytes"] > 0 for sample in samples)


def test_split_of_each_request_adds_up_to_its_time_to_first_token(report: dict[str, Any]) -> None:
    for sample in report["samples"]:
        assert sum(sample["split"].values()) == pytest.approx(sample["ttft_ms"], rel=0.05)
        assert sample["split"]["p_compute"] >= 2 * 0.99  # what the profile asks for, in milliseconds
        assert {"register", "post", "wire", "notice", "d_wakeup", "d_step"} <= sample["split"].keys()


def test_summary_says_what_was_measured_and_what_it_cost(report: dict[str, Any]) -> None:
    assert report["simulated"] is True
    rows = report["summary"]
    assert {(row["input_tokens"], row["load"]) for row in rows} == {
        (tokens, f"concurrency {requests}") for tokens in (40, 300) for requests in (1, 4)
    }
    for row in rows:
        assert row["errors"] == row["wrong_texts"] == 0
        assert row["cost"]["prefill_us_per_request"] > 0
        assert row["ratios"]["ttft"]["ratio"] == 1.0


def test_fragmented_pool_takes_more_descriptors_than_a_contiguous_one_would(report: dict[str, Any]) -> None:
    layers = 8
    whole = [sample["descriptors"] for sample in report["samples"] if sample["input_tokens"] == 300]
    assert min(whole) > 4 * layers


def test_report_and_trace_are_written(folder: Path) -> None:
    assert "kvpush:push" in (folder / "html").read_text()
    assert json.loads((folder / "trace").read_text())["traceEvents"]


def test_wrong_option_is_refused_before_anything_starts() -> None:
    done = subprocess.run([*COMMAND, "--rate", "0.5"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "concurrency/rate" in done.stderr
