from pathlib import Path

from kvpush.bench.cost import CellCost, HookMeter, Spent, total
from kvpush.bench.logs import DECODE, PREFILL
from kvpush.sim.hooktimes import HookClock, clock_file


def test_meter_counts_what_was_spent_since_it_was_made(tmp_path: Path) -> None:
    clock = HookClock(clock_file(tmp_path, PREFILL, "scheduler"))
    build = clock.wrap("build_connector_meta", lambda: sum(range(20_000)))
    build()
    meter = HookMeter(tmp_path)
    build()
    build()
    cost = meter.cost(requests=4, cores=1.5)
    assert (cost.prefill.steps, cost.decode.steps) == (2, 0)
    assert cost.prefill.us > 100
    assert cost.prefill.us < cost.prefill.counted_us


def test_totals_are_per_request_and_per_step_over_all_rounds(tmp_path: Path) -> None:
    nothing = Spent(0.0, 0.0, 0, 0.0)
    spent = Spent(500.0, 550.0, 20, 90.0), Spent(700.0, 850.0, 40, 30.0)
    rounds = [CellCost(10, cores, one, nothing) for cores, one in zip((1.0, 2.0), spent, strict=True)]
    cost = total(rounds)
    assert cost is not None
    assert (cost.prefill_us_per_request, cost.prefill_us_per_step) == (60.0, 20.0)
    assert cost.prefill_counted_us_per_request == 70.0
    assert (cost.longest_hook_us, cost.cpu_cores) == (90.0, 1.5)


def test_engine_without_a_connector_has_no_cost(tmp_path: Path) -> None:
    meter = HookMeter(tmp_path)
    assert total([meter.cost(5, 0.1)]) is None
    assert total([]) is None
    assert not clock_file(tmp_path, DECODE, "worker").exists()


def test_two_sides_of_an_engine_add_up(tmp_path: Path) -> None:
    sides = (("scheduler", "build_connector_meta"), ("worker", "start_load_kv"))
    hooks = [
        HookClock(clock_file(tmp_path, DECODE, side)).wrap(hook, lambda: sum(range(20_000))) for side, hook in sides
    ]
    spent = []
    for calls in ([hooks[0]], [hooks[1]], hooks):
        meter = HookMeter(tmp_path)
        for call in calls:
            call()
        spent.append(meter.cost(1, 0.0).decode)
    assert [one.steps for one in spent] == [1, 0, 1]
    assert all(one.us > 100 for one in spent)
