"""A running transfer thread that is told one thing directly and another with steps: in the order of what was said."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
from runtime.rig import nothing_left, until
from runtime.side import Side, announce, answer, answers, final, new_key, receive

from kvpush.core.commands import Abort, Command
from kvpush.core.events import Outcome, ReceiveEnded
from kvpush.core.ids import Address
from kvpush.runtime.local import SchedulerEnd
from kvpush.transport.memory import MemoryFabric

NOBODY, BLOCK = Address("127.0.0.1", 9), (1,)


@dataclass
class Recorder:
    """What the thread has carried out, in its order."""

    commands: list[Command] = field(default_factory=list)

    def has(self, number: int) -> bool:
        return len(self.commands) >= number

    def localize(self, command: Command) -> Command:
        self.commands.append(command)
        return command


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def side(recorder: Recorder) -> Iterator[Side]:
    with nothing_left():
        made = Side("engine", lambda: MemoryFabric().transport("engine"))
        made.localize_with(recorder.localize)
        made.start()
        yield made
        made.stop()


@pytest.fixture
def scheduler(side: Side) -> Iterator[SchedulerEnd]:
    made = SchedulerEnd([side.thread.local_path])
    yield made
    made.close()


def test_what_is_said_directly_is_carried_out_before_the_step_behind_it(
    side: Side, scheduler: SchedulerEnd, recorder: Recorder
) -> None:
    keys = [new_key() for _ in range(2000)]
    said: list[tuple[Command, Command]] = [(announce(key), final(key, 4, BLOCK)) for key in keys]
    for number, (directly, with_step) in enumerate(said):
        assert scheduler.say(directly)
        side.submit(with_step)
        if number % 100 == 99:
            until(partial(recorder.has, 2 * number - 50))
    until(lambda: len(recorder.commands) == 2 * len(said))
    for first, second in said:
        assert recorder.commands.index(first) < recorder.commands.index(second)


def test_sleeping_thread_wakes_when_it_is_told_something_and_sleeps_again(
    side: Side, scheduler: SchedulerEnd, recorder: Recorder
) -> None:
    for _ in range(3):
        recorder.commands.clear()
        assert scheduler.say(Abort(new_key()))
        until(lambda: recorder.commands)
    assert side.turns() < 50


def test_thread_goes_on_when_the_scheduler_ends(side: Side, scheduler: SchedulerEnd) -> None:
    command = receive(new_key(), NOBODY, 4, BLOCK)
    scheduler.say(command)
    scheduler.close()
    ended = answer(side, command.key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.outcome is Outcome.FAILED
    turns = side.turns()
    side.submit(Abort(new_key()))
    until(lambda: side.turns() > turns)
    assert side.turns() < turns + 50
    assert len(answers(side.drain(), command.key)) == 1
