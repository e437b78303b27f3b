import threading
from pathlib import Path
from time import thread_time

import pytest

from kvpush.sim.hooktimes import EVERY, HookClock, HookTime, read_clock

CALLS = 2_000
KNOWN_US = 200.0


def use_cpu() -> None:
    """`KNOWN_US` of the calling thread's CPU, however long that takes."""
    until = thread_time() + KNOWN_US / 1e6
    while thread_time() < until:
        pass


def test_clock_counts_calls_cpu_and_the_longest(tmp_path: Path) -> None:
    clock = HookClock(tmp_path / "hooks.bin")
    durations = iter([0, 200_000, 0])

    def hook(value: int, *, twice: int) -> int:
        return value * twice + sum(range(next(durations)))

    timed = clock.wrap("start_load_kv", hook)
    assert timed(3, twice=2) == 6
    timed(3, twice=2)
    timed(3, twice=2)
    [(name, time)] = read_clock(tmp_path / "hooks.bin").items()
    assert (name, time.calls) == ("start_load_kv", 3)
    assert time.cpu_us > 500
    assert time.longest_us > 500


def test_hook_that_waits_costs_no_cpu_but_is_known_to_be_long(tmp_path: Path) -> None:
    HookClock(tmp_path / "hooks.bin").wrap("build_connector_meta", lambda: threading.Event().wait(0.2))()
    time = read_clock(tmp_path / "hooks.bin")["build_connector_meta"]
    assert time.cpu_us < 100_000
    assert time.longest_us >= 200_000


@pytest.mark.parametrize("hook", ["build_connector_meta", "save_kv_layer"])
def test_hook_that_does_nothing_is_counted_but_costs_about_nothing(tmp_path: Path, hook: str) -> None:
    timed = HookClock(tmp_path / "hooks.bin").wrap(hook, lambda: None)
    least = None
    for _ in range(10):  # the machine may be busy with something else in some of them
        before = read_clock(tmp_path / "hooks.bin").get(hook)
        for _ in range(CALLS // 10):
            timed()
        spent = read_clock(tmp_path / "hooks.bin")[hook].since(before)
        least = spent if least is None or spent.own_us < least.own_us else least
    assert least is not None
    assert least.cpu_us > 0
    assert least.own_us < least.cpu_us / 2
    assert least.own_us / least.calls < 0.3


@pytest.mark.parametrize("hook", ["build_connector_meta", "save_kv_layer"])
def test_hook_that_uses_cpu_is_counted_with_that(tmp_path: Path, hook: str) -> None:
    timed = HookClock(tmp_path / "hooks.bin").wrap(hook, use_cpu)
    for _ in range(3 * EVERY):
        timed()
    spent = read_clock(tmp_path / "hooks.bin")[hook]
    assert spent.calls == 3 * EVERY
    assert 0.98 * KNOWN_US < spent.own_us / spent.calls < 1.5 * KNOWN_US


def test_clock_is_never_taken_off_below_nothing_and_of_the_calls_since_alone() -> None:
    before = HookTime(calls=10, cpu_us=50.0, clock_us=4.0, longest_us=9.0)
    after = HookTime(calls=15, cpu_us=51.0, clock_us=6.0, longest_us=9.0)
    assert (before.own_us, after.since(before).own_us) == (46.0, 0.0)
    assert after.since(before) == HookTime(calls=5, cpu_us=1.0, clock_us=2.0, longest_us=9.0)
    assert after.since(None) == after


def test_hook_that_raises_is_timed_and_its_error_passed_on(tmp_path: Path) -> None:
    def hook() -> None:
        raise KeyError("gone")

    timed = HookClock(tmp_path / "hooks.bin").wrap("wait_for_save", hook)
    with pytest.raises(KeyError, match="gone"):
        timed()
    assert read_clock(tmp_path / "hooks.bin")["wait_for_save"].calls == 1


def test_hooks_do_not_share_counters(tmp_path: Path) -> None:
    clock = HookClock(tmp_path / "hooks.bin")
    first, second = (clock.wrap(hook, lambda: None) for hook in ("on_new_request", "clear_connector_metadata"))
    first()
    second()
    second()
    calls = {hook: time.calls for hook, time in read_clock(tmp_path / "hooks.bin").items()}
    assert calls == {"on_new_request": 1, "clear_connector_metadata": 2}
