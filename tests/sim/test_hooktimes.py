import threading
from pathlib import Path

import pytest

from kvpush.sim.hooktimes import HookClock, read_clock


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
