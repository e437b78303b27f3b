"""What CPU connector hooks cost the engines' threads during one cell, from the counters of hooktimes.py."""

from dataclasses import dataclass
from pathlib import Path

from kvpush.bench.logs import DECODE, PREFILL
from kvpush.bench.results import Cost
from kvpush.sim.hooktimes import HookTime, clock_file, read_clock

_STEP = "build_connector_meta"
"""The hook that is called once in each step of an engine."""


@dataclass(frozen=True)
class Spent:
    """In the hooks of one engine: microseconds of CPU without what the clock itself takes, `counted_us` with it; the
    steps that the engine took meanwhile, and the longest call."""

    us: float
    counted_us: float
    steps: int
    longest_us: float


@dataclass(frozen=True)
class CellCost:
    """One cell of one visit. `cores`: CPU of all processes of the cluster."""

    requests: int
    cores: float
    prefill: Spent
    decode: Spent


class HookMeter:
    """Takes the difference of the counters between its making and `cost`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = {engine: _read(folder, engine) for engine in (PREFILL, DECODE)}

    def cost(self, requests: int, cores: float) -> CellCost:
        """What was spent since."""
        return CellCost(requests, cores, self._spent(PREFILL), self._spent(DECODE))

    def _spent(self, engine: str) -> Spent:
        before, after = self._before[engine], _read(self._folder, engine)
        spent = {hook: time.since(before.get(hook)) for hook, time in after.items()}
        return Spent(
            us=sum(time.own_us for time in spent.values()),
            counted_us=sum(time.cpu_us for time in spent.values()),
            steps=spent[_STEP].calls if _STEP in spent else 0,
            longest_us=max((time.longest_us for time in spent.values()), default=0.0),
        )


def _read(folder: Path, engine: str) -> dict[str, HookTime]:
    times: dict[str, HookTime] = {}
    for side in ("scheduler", "worker"):
        if (path := clock_file(folder, engine, side)).exists():
            times |= read_clock(path)
    return times


def total(costs: list[CellCost]) -> Cost | None:
    """The costs of a cell over all rounds; None when no hook was timed."""
    requests = sum(cost.requests for cost in costs)
    if not requests or not any(cost.prefill.steps or cost.decode.steps for cost in costs):
        return None
    prefill, decode = [cost.prefill for cost in costs], [cost.decode for cost in costs]
    return Cost(
        prefill_us_per_request=round(sum(spent.us for spent in prefill) / requests, 1),
        prefill_us_per_step=_per_step(prefill),
        prefill_counted_us_per_request=round(sum(spent.counted_us for spent in prefill) / requests, 1),
        decode_us_per_request=round(sum(spent.us for spent in decode) / requests, 1),
        decode_us_per_step=_per_step(decode),
        decode_counted_us_per_request=round(sum(spent.counted_us for spent in decode) / requests, 1),
        longest_hook_us=round(max(spent.longest_us for spent in prefill + decode), 1),
        cpu_cores=round(sum(cost.cores for cost in costs) / len(costs), 3),
    )


def _per_step(spent: list[Spent]) -> float:
    return round(sum(one.us for one in spent) / max(1, sum(one.steps for one in spent)), 2)
