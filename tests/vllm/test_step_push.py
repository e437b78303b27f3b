"""What a step makes final goes to the gate behind the right event, in parts where they are large enough."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from kvpush.core.commands import Command, Final
from kvpush.core.ids import Key, RequestId, TransferId
from kvpush.core.layout import Group, Kind, Plane, Region, one_head
from kvpush.runtime.gate import Gate
from kvpush.vllm.settings import Push
from kvpush.vllm.step_push import MOST_PARTS, PART_BYTES, StepFinals, StepPush

LAYERS = 32
_HEAD_BYTES = 128
_NAMES = tuple(f"layer{i}" for i in range(LAYERS))
_TOKEN_BYTES = LAYERS * _HEAD_BYTES
_LAYOUT = one_head(
    "m",
    "float16",
    _HEAD_BYTES,
    Group(16, 4096),
    tuple(Plane(name, Kind.PAIR, 0, i << 32, 2048, 128, 128) for i, name in enumerate(_NAMES)),
    Region(0, LAYERS << 32),
)
_FINAL = Final(Key(TransferId("0" * 32)), RequestId("r"), 5000, ((1,),))


@dataclass
class Device:
    """A device that is as far as its launches: records what had been launched when each event was."""

    launched: int = 0


class Harness:
    """A step push whose gate notes how many layers had been launched when something passed."""

    def __init__(self, push: Push) -> None:
        self.device = Device()
        self.passed: list[tuple[int, Command]] = []
        self.step_push = StepPush(push, _LAYOUT, Gate(self._note, "gate-of-a-test"), self._record)

    def _note(self, commands: Iterable[Command]) -> None:
        self.passed += [(self.device.launched, command) for command in commands]

    def _record(self) -> None:
        return None

    def run(self, step: StepFinals, names: Iterable[str] = _NAMES) -> None:
        """One step of the model."""
        self.step_push.begin(step)
        self.device.launched = 0
        for name in names:
            self.device.launched += 1
            self.step_push.layer_launched(name)
        self.step_push.launched()


def tokens_for(nbytes: int) -> int:
    return -(-nbytes // _TOKEN_BYTES)


def test_long_step_is_handed_over_in_equal_parts_and_the_last_is_as_it_was_given() -> None:
    harness = Harness(Push.LAYERWISE)
    harness.run(StepFinals((_FINAL,), tokens_for(100 * PART_BYTES)))

    share = LAYERS // MOST_PARTS
    parts = [
        (launched, command.layers, command.last) for launched, command in harness.passed if isinstance(command, Final)
    ]
    assert parts[:-1] == [(n * share, n * share, False) for n in range(1, MOST_PARTS)]
    assert harness.passed[-1] == (LAYERS, _FINAL)


@pytest.mark.parametrize(("nbytes", "parts"), [(PART_BYTES, 1), (2 * PART_BYTES, 2), (3 * PART_BYTES, 3)])
def test_parts_are_no_smaller_than_is_worth_their_cost(nbytes: int, parts: int) -> None:
    harness = Harness(Push.LAYERWISE)
    harness.run(StepFinals((_FINAL,), tokens_for(nbytes)))

    assert len(harness.passed) == parts


@pytest.mark.parametrize("push", [Push.PROGRESSIVE, Push.WHOLE])
def test_step_is_handed_over_at_once_when_layers_are_not_asked_for(push: Push) -> None:
    harness = Harness(push)
    harness.run(StepFinals((_FINAL,), tokens_for(100 * PART_BYTES)))

    assert harness.passed == [(LAYERS, _FINAL)]


@pytest.mark.parametrize(
    "names", [(), _NAMES[1:], tuple(reversed(_NAMES))], ids=["no hooks", "first missing", "reversed"]
)
def test_layers_that_come_otherwise_than_in_order_are_handed_over_at_the_end(names: tuple[str, ...]) -> None:
    harness = Harness(Push.LAYERWISE)
    harness.run(StepFinals((_FINAL,), tokens_for(100 * PART_BYTES)), names)

    assert [command for _, command in harness.passed] == [_FINAL]


def test_step_that_makes_nothing_final_hands_nothing_over() -> None:
    harness = Harness(Push.LAYERWISE)
    harness.run(StepFinals((_FINAL,), tokens_for(4 * PART_BYTES)))
    harness.passed.clear()
    harness.run(StepFinals())

    assert not harness.passed
