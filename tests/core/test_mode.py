"""The choice between push and pull."""

import pytest

from kvpush.core.mode import MARGIN, MEASURED_BYTES, SAMPLES, Mode, ModeSetting, Rates, agree, in_words

BOTH = tuple(Mode)
LARGE = 4 * MEASURED_BYTES


def measured(push_s: float, pull_s: float) -> Rates:
    rates = Rates()
    for _ in range(SAMPLES):
        rates.note(Mode.PUSH, LARGE, push_s)
        rates.note(Mode.PULL, LARGE, pull_s)
    return rates


def test_both_modes_are_tried_in_turn_until_each_is_measured() -> None:
    rates, tried = Rates(), []
    while not rates.settled:
        mode = rates.choose(BOTH, LARGE)
        tried.append(mode)
        rates.note(mode, LARGE, 1.0)
    assert tried == [Mode.PUSH, Mode.PULL] * SAMPLES


def test_small_transfer_is_pushed_while_nothing_is_known_and_measures_nothing() -> None:
    rates = Rates()
    assert rates.choose(BOTH, 100) is Mode.PUSH
    assert not rates.note(Mode.PULL, MEASURED_BYTES - 1, 0.001)
    assert not rates.samples


@pytest.mark.parametrize(
    ("pull_s", "chosen"), [(100.0, Mode.PUSH), (1.0, Mode.PUSH), (0.9 / MARGIN, Mode.PULL), (0.01, Mode.PULL)]
)
def test_faster_mode_is_chosen_pull_only_when_it_is_clearly_faster(pull_s: float, chosen: Mode) -> None:
    rates = measured(push_s=1.0, pull_s=pull_s)
    assert {rates.choose(BOTH, nbytes) for nbytes in (1, LARGE)} == {chosen}


def test_measurement_is_complete_once() -> None:
    rates = Rates()
    done = [rates.note(mode, LARGE, 1.0) for _ in range(SAMPLES + 1) for mode in Mode]
    assert done.count(True) == 1


def test_first_transfer_that_sets_up_connections_does_not_decide() -> None:
    rates = measured(push_s=1.0, pull_s=0.5)
    rates.note(Mode.PULL, LARGE, 50.0)
    assert rates.choose(BOTH, LARGE) is Mode.PULL


@pytest.mark.parametrize("mode", Mode)
def test_pair_with_one_mode_in_common_uses_it(mode: Mode) -> None:
    assert agree(ModeSetting.AUTO.modes, ModeSetting(mode.value).modes) == (mode,)
    assert measured(1.0, 1.0).choose((mode,), LARGE) is mode


def test_modes_are_named_in_messages() -> None:
    assert [in_words(each) for each in ((), (Mode.PULL,), BOTH)] == ["nothing", "pull", "push and pull"]
