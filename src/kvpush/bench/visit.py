"""One contender's turn: start its cluster, prepare it, measure all cells, stop it, read what its processes logged."""

import time
from dataclasses import dataclass, field, replace

from kvpush.bench.client import Answer, Target
from kvpush.bench.contenders import Contender, log_folder, make_cluster
from kvpush.bench.cost import CellCost, HookMeter
from kvpush.bench.fragment import fragment
from kvpush.bench.load import Concurrency, offer
from kvpush.bench.logs import RoundLogs, read_round
from kvpush.bench.machine import CpuMeter
from kvpush.bench.plan import START_S, Cell, Options, Pool, Visit, cells, expected_seconds, requests_in_round, seed_of
from kvpush.bench.progress import Bar
from kvpush.bench.workload import Prompt, Shape, draw_prompts
from kvpush.cli.cluster import Cluster
from kvpush.core.errors import KVPushError
from kvpush.sim.profile import Profile

_WARM_UP = 3
_WARM_UP_TIMEOUT_S = 20.0
_WARM_UP_TRIES = 4
_WARM_UP_PAUSE_S = 2.0
_IDLE_S = 4.0
_SATURATION_TOKENS = 49_152
"""Prompt tokens in the burst that measures saturation: a few seconds of prefill."""


class WarmUpFailed(KVPushError):
    """A cluster did not answer before measuring began."""


@dataclass
class Measured:
    """One cell of one visit."""

    cell: Cell
    prompts: list[Prompt]
    answers: list[Answer]
    cost: CellCost


@dataclass
class Visited:
    """All that one visit found; `failure` says why it ended early, "" when it did not."""

    visit: Visit
    cells: list[Measured] = field(default_factory=list)
    idle_cores: dict[str, float] = field(default_factory=dict)
    logs: RoundLogs = field(default_factory=RoundLogs)
    failure: str = ""


class Visitor:
    """Visits contenders one after the other; remembers the saturation that the first visit measured."""

    def __init__(self, options: Options, profile: Profile, bar: Bar) -> None:
        self._options = options
        self._profile = profile
        self._bar = bar
        self.saturation: dict[int, float] = {}

    def visit(self, visit: Visit) -> Visited:
        """Whatever fails ends this visit only."""
        visited = Visited(visit)
        try:
            self._measure_all(visit, visited)
        except KVPushError as error:
            visited.failure = str(error)
            self._bar.say(f"{_name(visit)}: FAILED: {error}")
        folder = log_folder(self._options.setting, visit.contender, visit.round)
        visited.logs = read_round(folder, visit.contender is Contender.SINGLE)
        return visited

    def _measure_all(self, visit: Visit, visited: Visited) -> None:
        self._bar.say(f"{_name(visit)}: starting")
        with make_cluster(self._options.setting, visit.contender, visit.round) as cluster:
            self._bar.advance(START_S)
            self._prepare(cluster, _name(visit))
            if visit.round == 0:
                visited.idle_cores = _idle_cores(cluster)
            for cell in cells(self._options, self.saturation):
                self._bar.say(f"{_name(visit)}: {cell.shape.input_tokens} tokens, {cell.load}")
                visited.cells.append(self._measure(cluster, visit, cell))
                cluster.check()

    def _prepare(self, cluster: Cluster, name: str) -> None:
        target = self._target(cluster)
        self._bar.say(f"{name}: warming up")
        for tokens in self._options.inputs:
            _warm_up(target, self._draw(tokens, 4, _WARM_UP, seed=tokens))
        if self._options.rates and not self.saturation:
            self._bar.say(f"{name}: measuring saturation")
            self.saturation = {tokens: self._saturation(cluster, tokens) for tokens in self._options.inputs}
        if self._options.pool is Pool.FRAGMENTED:
            self._bar.say(f"{name}: fragmenting the pools")
            self._fragment(cluster)

    def _target(self, cluster: Cluster) -> Target:
        return Target(cluster.url, cluster.spec.served_name, self._options.timeout_s)

    def _draw(self, tokens: int, output: int, count: int, seed: int) -> list[Prompt]:
        shape = Shape(input_tokens=tokens, output_tokens=output)
        return draw_prompts(shape, count, self._profile.vocabulary, -seed % 2**32)

    def _saturation(self, cluster: Cluster, tokens: int) -> float:
        """Prompts per second that one engine prefills: the limit of a pair's prefill side, whatever the connector."""
        count = max(6, _SATURATION_TOKENS // tokens)
        engine = cluster.engines[0]
        target = Target(engine.url, cluster.spec.served_name)
        answers = offer(target, self._draw(tokens, 1, count, tokens + 1), Concurrency(count), "saturation", 0, _nothing)
        firsts = sorted(answer.chunks[0] for answer in answers if not answer.error)
        if len(firsts) < count:
            raise WarmUpFailed(f"{engine.url}: {next(answer.error for answer in answers if answer.error)}")
        return count / (firsts[-1] - min(answer.sent for answer in answers))

    def _fragment(self, cluster: Cluster) -> None:
        block_size = self._profile.block_size
        blocks = self._options.setting.kv_bytes // (block_size * self._profile.token_bytes)
        for i, engine in enumerate(cluster.engines):
            target = Target(engine.url, cluster.spec.served_name)
            fragment(target, blocks, block_size, self._profile.vocabulary, self._options.seed + i)

    def _measure(self, cluster: Cluster, visit: Visit, cell: Cell) -> Measured:
        options = self._options
        count = len(requests_in_round(options, visit.round))
        seed = seed_of(options, cell, visit.round)
        prompts = draw_prompts(cell.shape, count, self._profile.vocabulary, seed)
        _warm_up(self._target(cluster), self._draw(cell.shape.input_tokens, 2, 1, seed + 2**20))
        step_s = expected_seconds(cell.load, count, self.request_s(cell.shape)) / count
        meter = HookMeter(log_folder(options.setting, visit.contender, visit.round))
        cpu, started = CpuMeter(cluster.pids().values()), time.monotonic()
        name = f"{visit.contender.value.replace(':', '-')}-{visit.round}-{cell.index}"
        answers = offer(self._target(cluster), prompts, cell.load, name, seed, lambda: self._bar.advance(step_s))
        cores = cpu.seconds() / (time.monotonic() - started)
        return Measured(cell, prompts, answers, meter.cost(len(answers), cores))

    def request_s(self, shape: Shape) -> float:
        """What one request takes at least."""
        decode = self._profile.step_s(0, shape.input_tokens) * shape.output_tokens
        return self._profile.step_s(shape.input_tokens, 0) + decode


def _name(visit: Visit) -> str:
    return f"round {visit.round + 1}: {visit.contender}"


def _nothing() -> None:
    return None


def _warm_up(target: Target, prompts: list[Prompt]) -> None:
    """Answered once means warm. A first contact that fails is tried again: some connectors lose it on a busy host."""
    brisk = replace(target, timeout_s=_WARM_UP_TIMEOUT_S)
    for attempt in range(_WARM_UP_TRIES):
        time.sleep(attempt * _WARM_UP_PAUSE_S)
        answers = offer(brisk, prompts, Concurrency(1), "warm-up", 0, _nothing)
        failed = [answer.error for answer in answers if answer.error]
        if not failed:
            return
    raise WarmUpFailed(f"{target.url}: {failed[0]}")


def _idle_cores(cluster: Cluster) -> dict[str, float]:
    meters = {name: CpuMeter([pid]) for name, pid in cluster.pids().items()}
    started = time.monotonic()
    time.sleep(_IDLE_S)
    seconds = time.monotonic() - started
    return {name: round(meter.seconds() / seconds, 4) for name, meter in meters.items()}
