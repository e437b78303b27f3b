"""Commands in, events out, from many threads at once."""

import os
import select
import threading
from collections.abc import Iterator

import pytest

from kvpush.core.commands import Abort, Command
from kvpush.core.errors import Reason
from kvpush.core.events import Counted, SourceFree
from kvpush.core.ids import Key, RequestId, TransferId
from kvpush.runtime import mailbox as mailbox_module
from kvpush.runtime.mailbox import Mailbox


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def command(number: int) -> Abort:
    return Abort(Key(TransferId(f"{number:032x}")))


def promise(number: int) -> SourceFree:
    return SourceFree(Key(TransferId(f"{number:032x}")), RequestId(str(number)))


def is_woken(mailbox: Mailbox) -> bool:
    return bool(select.select([mailbox.wake_fd], [], [], 0)[0])


def test_commands_come_out_in_order_and_in_portions(mailbox: Mailbox) -> None:
    mailbox.submit(command(number) for number in range(5))
    assert mailbox.take(3) == [command(0), command(1), command(2)]
    assert mailbox.take(3) == [command(3), command(4)]
    assert mailbox.take(3) == []


def test_sleeper_is_woken_once_by_many_commands(mailbox: Mailbox) -> None:
    assert mailbox.fall_asleep()
    for number in range(5):
        mailbox.submit([command(number)])
    assert is_woken(mailbox)
    assert os.eventfd_read(mailbox.wake_fd) == 1


def test_thread_that_is_awake_is_not_woken(mailbox: Mailbox) -> None:
    mailbox.submit([command(0)])
    assert not is_woken(mailbox)


def test_thread_does_not_fall_asleep_with_a_command_waiting(mailbox: Mailbox) -> None:
    mailbox.submit([command(0)])
    assert not mailbox.fall_asleep()
    mailbox.submit([command(1)])
    assert not is_woken(mailbox)


def test_waking_clears_the_signal(mailbox: Mailbox) -> None:
    mailbox.fall_asleep()
    mailbox.submit([command(0)])
    mailbox.wake_up()
    assert not is_woken(mailbox)
    mailbox.wake_up()


def test_no_command_is_lost_and_no_wake_up_missed_among_threads(mailbox: Mailbox) -> None:
    submitted, per_thread = 4, 2000
    taken: list[Command] = []

    def consume() -> None:
        while True:
            taken.extend(mailbox.take(100))
            if len(taken) == submitted * per_thread:
                return
            if mailbox.fall_asleep():
                assert select.select([mailbox.wake_fd], [], [], 10)[0], "a wake-up was missed"
            mailbox.wake_up()

    def submit(first: int) -> None:
        for number in range(first, first + per_thread):
            mailbox.submit([command(number)])

    consumer = threading.Thread(target=consume)
    producers = [threading.Thread(target=submit, args=(index * per_thread,)) for index in range(submitted)]
    for thread in [consumer, *producers]:
        thread.start()
    for thread in [*producers, consumer]:
        thread.join(30)
    assert sorted(taken, key=str) == sorted(map(command, range(submitted * per_thread)), key=str)


def test_events_are_drained_in_order_by_any_thread(mailbox: Mailbox) -> None:
    mailbox.publish([promise(0), promise(1)])
    mailbox.publish([promise(2)])
    assert mailbox.drain() == [promise(0), promise(1), promise(2)]
    assert mailbox.drain() == []


def test_two_drainers_get_each_event_once(mailbox: Mailbox) -> None:
    drained: list[list[object]] = [[], []]

    def drain(into: list[object]) -> None:
        while len(drained[0]) + len(drained[1]) < 5000:
            into.extend(mailbox.drain())

    threads = [threading.Thread(target=drain, args=(into,)) for into in drained]
    for thread in threads:
        thread.start()
    for number in range(5000):
        mailbox.publish([promise(number)])
    for thread in threads:
        thread.join(10)
    assert sorted(drained[0] + drained[1], key=str) == sorted(map(promise, range(5000)), key=str)


def test_engine_that_never_drains_keeps_promises_but_not_every_count(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "EVENT_BACKLOG", 10)
    for number in range(100):
        mailbox.publish([Counted("late_message", Reason.RETIRED_TRANSFER), promise(number)])
    drained = mailbox.drain()
    assert [event for event in drained if isinstance(event, SourceFree)] == [promise(number) for number in range(100)]
    assert len(drained) < 110


def test_submitting_to_a_closed_mailbox_is_harmless(mailbox: Mailbox) -> None:
    mailbox.fall_asleep()
    mailbox.close()
    mailbox.submit([command(0)])
    assert mailbox.take(1) == [command(0)]
