"""The simulated device inside a real vLLM engine."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvpush.sim import kvfunc, profile
from kvpush.sim.profile import Profile
from kvpush.sim.settings import ALONE, steps_file
from kvpush.sim.steplog import LoggedStep, read_steps

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

Asked = tuple[list[int], int]

LENGTHS = (1, 2, 15, 16, 17, 511, 512, 513, 1500, 700, 900, 300, 1200)
_TESTS = Path(__file__).parents[1]


@dataclass
class Run:
    """What one engine did with two waves of prompts: all of them, and the last ones again."""

    asked: list[Asked]
    answers: list[list[int]]
    preempted: int
    steps: list[LoggedStep]


@pytest.fixture(scope="module")
def ci() -> Profile:
    return profile.load("ci")


@pytest.fixture(scope="module", params=["sync", "async"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ci: Profile) -> Run:
    folder = tmp_path_factory.mktemp("offline")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(kvfunc.FIRST_TOKEN, ci.vocabulary, length).tolist() for length in LENGTHS]
    waves = [[(prompt, 300) for prompt in prompts], [(prompt, 60) for prompt in reversed(prompts[-3:])]]
    done = subprocess.run(
        [sys.executable, "-m", "sim.offline", str(folder), request.param],
        input=json.dumps(waves),
        cwd=_TESTS,
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    answers = [answer for wave in result["answers"] for answer in wave]
    return Run(
        [ask for wave in waves for ask in wave], answers, result["preempted"], read_steps(steps_file(folder, ALONE))
    )


def test_engine_answers_what_the_model_function_says_for_every_prompt(run: Run, ci: Profile) -> None:
    planes = ci.planes
    for (prompt, output), answer in zip(run.asked, run.answers, strict=True):
        assert answer == kvfunc.expected_tokens(prompt, output, planes, ci.vocabulary)


def test_pool_was_too_small_so_that_requests_were_preempted_and_resumed(run: Run) -> None:
    assert run.preempted > 0


def test_long_prompts_were_computed_in_chunks_and_repeated_ones_from_the_prefix_cache(run: Run) -> None:
    rows = [row for step in run.steps for row in step.rows]
    assert any(not row.samples and row.end - row.start > 1 for row in rows)
    first_starts: dict[str, int] = {}
    for row in rows:
        first_starts.setdefault(row.request_id, row.start)
    assert len(first_starts) == len(run.asked)
    assert any(start > 0 for start in first_starts.values())


def test_steps_overlap_with_scheduling_when_they_may(run: Run, request: pytest.FixtureRequest) -> None:
    early = sum(step.launched < earlier.end for earlier, step in pairwise(run.steps))
    assert (early > len(run.steps) / 4) is ("async" in request.node.name)


def test_each_step_took_its_modelled_time_and_began_after_the_one_before(run: Run, ci: Profile) -> None:
    for earlier, step in pairwise(run.steps):
        assert step.start >= earlier.end - 1e-9
        prefill = sum(row.end - row.start for row in step.rows if row.end - row.start > 1)
        context = sum(row.end for row in step.rows if row.end - row.start == 1)
        assert step.end - step.start == pytest.approx(ci.step_s(prefill, context))
