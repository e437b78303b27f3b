"""What the scheduler's side asks of all transfer threads: said directly, and carried by the next step.

The step carries everything, so that each worker knows what vLLM will be owed, and tells which ranks have it already.
What must not overtake a step's own commands (see runtime/gate.py) goes with the steps alone.
"""

from kvpush.core.commands import Command
from kvpush.runtime.local import SchedulerEnd
from kvpush.vllm.metadata import NO_COMMANDS, StepCommands
from kvpush.vllm.step_push import StepFinals

_NOBODY: frozenset[int] = frozenset()


class Orders:
    """The commands since the last step. Owned by vLLM's engine thread."""

    def __init__(self) -> None:
        self.line = SchedulerEnd()
        self._commands: list[Command] = []
        self._heard: list[frozenset[int]] = []

    def connect(self, line: SchedulerEnd) -> None:
        """Speak to the transfer threads directly, and hear them, from now on."""
        self.line.close()
        self.line = line

    def say(self, command: Command) -> None:
        """At once, where that is possible."""
        self._commands.append(command)
        self._heard.append(self.line.say(command))

    def say_with_step(self, command: Command) -> None:
        """Not before the steps that were scheduled so far."""
        self._commands.append(command)
        self._heard.append(_NOBODY)

    def take(self, finals: StepFinals) -> StepCommands:
        """What a step carries, which makes `finals` final."""
        if not (self._commands or finals.finals):
            return NO_COMMANDS
        step = StepCommands(tuple(self._commands), finals, tuple(self._heard))
        self._commands, self._heard = [], []
        return step

    def __len__(self) -> int:
        return len(self._commands)
