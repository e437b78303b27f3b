"""`kvpush bench compare`: the same workload through several connectors, in alternation."""

import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

from rich.console import Console

from kvpush.bench import machine
from kvpush.bench.contenders import Contender
from kvpush.bench.plan import START_S, Options, Pool, Visit, cells, expected_seconds, requests_in_round, visits
from kvpush.bench.progress import progress_bar
from kvpush.bench.results import Failure, Idle, Report, Sample
from kvpush.bench.summary import expected_text, make_rows, make_samples
from kvpush.bench.visit import Measured, Visited, Visitor
from kvpush.core.errors import ConfigError
from kvpush.sim import profile as profiles
from kvpush.sim.profile import Profile


@dataclass
class Outcome:
    """What a comparison found; `visits` hold the processes' logs, for a trace."""

    report: Report
    visits: list[Visited] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        """Everything was measured, every request ended well, and no text was wrong."""
        return not self.report.failures and all(not row.errors and not row.wrong_texts for row in self.report.summary)


def compare(options: Options, console: Console) -> Outcome:
    """Measure. Raises `ConfigError` for a device that cannot be measured."""
    if options.setting.profile is None:
        raise ConfigError("device", f"'{options.setting.device}' is not simulated", "Use sim:PROFILE.")
    profile = profiles.load(options.setting.profile)
    started, wall = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    turns = visits(options)
    with progress_bar(console, _expected_s(options, profile, turns)) as bar:
        visitor = Visitor(options, profile, bar)
        done = [visitor.visit(turn) for turn in turns]
    samples = _samples(options, profile, done)
    report = _report(options, profile, visitor.saturation, done, samples)
    report.started, report.seconds = wall, round(time.monotonic() - started, 1)
    return Outcome(report, done)


def _expected_s(options: Options, profile: Profile, turns: list[Visit]) -> float:
    guess = {tokens: 1 / profile.step_s(tokens, 0) for tokens in options.inputs}
    total = 0.0
    for turn in turns:
        total += START_S
        for cell in cells(options, guess):
            decode = profile.step_s(0, cell.shape.input_tokens) * cell.shape.output_tokens
            alone = profile.step_s(cell.shape.input_tokens, 0) + decode
            total += expected_seconds(cell.load, len(requests_in_round(options, turn.round)), alone)
    return total


def _samples(options: Options, profile: Profile, done: list[Visited]) -> list[Sample]:
    right: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    samples = []
    for visited in done:
        for measured in visited.cells:
            known = right[measured.cell.index, visited.visit.round]
            if options.setting.verify and not known:
                known.update(_right_texts(measured, profile))
            samples += make_samples(visited, measured, known)
    return samples


def _right_texts(measured: Measured, profile: Profile) -> dict[int, str]:
    return {i: expected_text(prompt, profile) for i, prompt in enumerate(measured.prompts)}


def _report(
    options: Options, profile: Profile, saturation: dict[int, float], done: list[Visited], samples: list[Sample]
) -> Report:
    idle = {visited.visit.contender: visited.idle_cores for visited in done if visited.idle_cores}
    return Report(
        simulated=True,
        device=options.setting.device,
        device_source=profile.source,
        command=" ".join(["kvpush", *sys.argv[1:]]),
        started="",
        seconds=0.0,
        commit=machine.source_commit(),
        versions=machine.package_versions(),
        machine=machine.describe_machine(),
        seed=options.seed,
        rounds=options.rounds,
        fragmented=options.pool is Pool.FRAGMENTED,
        prefix_share=options.prefix_share,
        slo=options.slo,
        saturation_per_s={str(tokens): round(rate, 3) for tokens, rate in saturation.items()},
        idle=[Idle(connector=contender.value, cores=cores) for contender, cores in sorted(idle.items(), key=_name)],
        failures=[
            Failure(connector=one.visit.contender.value, round=one.visit.round, error=one.failure)
            for one in done
            if one.failure
        ],
        summary=make_rows(done, samples, options.slo),
        samples=samples,
    )


def _name(item: tuple[Contender, dict[str, float]]) -> str:
    return item[0].value
