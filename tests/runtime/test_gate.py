"""Commands wait for the device, in order by key, and what is superseded never passes."""

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from kvpush.core.commands import Abort, Command, Final, Retract, Withdraw
from kvpush.core.errors import Reason
from kvpush.core.ids import Key, RequestId, TransferId
from kvpush.runtime.gate import Gate

WITHIN_S = 10.0


class Fence:
    """A device event that the test fires."""

    def __init__(self, broken: Exception | None = None) -> None:
        self._fired = threading.Event()
        self._broken = broken

    def fire(self) -> None:
        self._fired.set()

    def query(self) -> bool:
        return self._fired.is_set()

    def synchronize(self) -> None:
        assert self._fired.wait(WITHIN_S)
        if self._broken is not None:
            raise self._broken


class Passed:
    """What has come through, and a way to wait for it."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self._more = threading.Condition()

    def submit(self, commands: Iterable[Command]) -> None:
        with self._more:
            self.commands += commands
            self._more.notify_all()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self._more:
            assert self._more.wait_for(holds, WITHIN_S), self.commands


@pytest.fixture
def passed() -> Passed:
    return Passed()


@pytest.fixture
def gate(passed: Passed) -> Iterator[Gate]:
    made = Gate(passed.submit, "gate-of-a-test")
    yield made
    made.close()


def key(number: int) -> Key:
    return Key(TransferId(f"{number:032x}"))


def final(number: int, tokens: int) -> Final:
    return Final(key(number), RequestId(f"r{number}"), tokens, ((1, 2),), last=False)


def test_commands_wait_until_the_device_has_come_so_far(gate: Gate, passed: Passed) -> None:
    fence = Fence()
    gate.submit_after(fence, [final(1, 16)])
    gate.submit([Abort(key(2))])
    assert passed.commands == [Abort(key(2))], "what needs no event is not held up"

    fence.fire()
    passed.wait_for(lambda: passed.commands[1:] == [final(1, 16)])


def test_commands_pass_at_once_on_a_device_without_events(gate: Gate, passed: Passed) -> None:
    gate.submit_after(None, [final(1, 16)])

    assert passed.commands == [final(1, 16)]
    assert "gate-of-a-test" not in [thread.name for thread in threading.enumerate()]


def test_later_step_never_overtakes_an_earlier_one(gate: Gate, passed: Passed) -> None:
    early, late = Fence(), Fence()
    late.fire()
    gate.submit_after(early, [final(1, 16)])
    gate.submit_after(late, [final(1, 32)])
    gate.submit_after(None, [final(1, 48)])
    assert not passed.commands

    early.fire()
    passed.wait_for(lambda: len(passed.commands) == 3)
    assert passed.commands == [final(1, 16), final(1, 32), final(1, 48)]


@pytest.mark.parametrize(
    "end",
    [
        Retract(key(1), RequestId("r1")),
        Withdraw(key(1), RequestId("r1"), Reason.PREFILL_ABORTED),
        Final(key(1), RequestId("r1"), 40, ((1, 2, 3),)),
    ],
    ids=["retracted", "withdrawn", "complete"],
)
def test_chunk_that_is_superseded_while_it_waits_never_passes(gate: Gate, passed: Passed, end: Command) -> None:
    fence = Fence()
    gate.submit_after(fence, [final(1, 16), final(2, 16)])
    gate.submit([end])
    fence.fire()

    passed.wait_for(lambda: final(2, 16) in passed.commands)
    assert passed.commands == [end, final(2, 16)]


def test_chunks_after_a_retraction_pass(gate: Gate, passed: Passed) -> None:
    fence = Fence()
    gate.submit_after(fence, [final(1, 32)])
    gate.submit([Retract(key(1), RequestId("r1"))])
    gate.submit_after(fence, [final(1, 16)])
    fence.fire()

    passed.wait_for(lambda: len(passed.commands) == 2)
    assert passed.commands == [Retract(key(1), RequestId("r1")), final(1, 16)]


def test_failed_device_ends_neither_the_gate_nor_what_comes_after(
    gate: Gate, passed: Passed, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Fence(RuntimeError("the device is gone")), Fence()
    gate.submit_after(broken, [final(1, 16)])
    gate.submit_after(whole, [final(2, 16)])
    broken.fire()
    whole.fire()

    passed.wait_for(lambda: bool(passed.commands))
    assert passed.commands == [final(2, 16)]
    assert "the device is gone" in caplog.text


def test_closed_gate_drops_what_waits_and_ends_its_thread(passed: Passed) -> None:
    gate, fence = Gate(passed.submit, "gate-of-a-test"), Fence()
    gate.submit_after(fence, [final(1, 16)])
    fence.fire()
    passed.wait_for(lambda: bool(passed.commands))
    gate.close()
    gate.submit_after(Fence(), [final(1, 32)])

    assert passed.commands == [final(1, 16)]
    assert "gate-of-a-test" not in [thread.name for thread in threading.enumerate()]
