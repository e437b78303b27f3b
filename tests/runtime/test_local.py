"""Between an engine's scheduler and its transfer threads over real sockets: commands, none of which is lost, and news,
which may be."""

import select
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvpush.core.commands import (
    Abort,
    Announce,
    Command,
    Expect,
    Final,
    Inquire,
    Keep,
    Receive,
    Sampled,
    Withdraw,
)
from kvpush.core.digests import digests_of
from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Outcome, PrefillBegun, Purpose, ReceiveEnded
from kvpush.core.ids import Address, EngineId, Key, RequestId, Target, TransferId
from kvpush.core.layout import Span
from kvpush.core.mode import Mode
from kvpush.runtime.local import SchedulerEnd, ThreadEnd

KEY, NAME = Key(TransferId("0" * 32)), RequestId("r")
BEGUN = PrefillBegun(KEY, NAME)
DELIVERED = ReceiveEnded(KEY, NAME, Outcome.DELIVERED, Reason.OK, token=7)
FAILED = ReceiveEnded(KEY, NAME, Outcome.FAILED, Reason.TRANSPORT)


@pytest.fixture
def threads() -> Iterator[list[ThreadEnd]]:
    """Two ranks."""
    made = [ThreadEnd(), ThreadEnd()]
    yield made
    for thread in made:
        thread.close()


@pytest.fixture
def scheduler(threads: list[ThreadEnd]) -> Iterator[SchedulerEnd]:
    made = SchedulerEnd(thread.path for thread in threads)
    yield made
    made.close()


def test_scheduler_hears_each_rank_once_and_only_what_cannot_wait(
    threads: list[ThreadEnd], scheduler: SchedulerEnd
) -> None:
    threads[0].send([BEGUN, Counted("x", Reason.OK), FAILED])
    threads[0].send([DELIVERED])
    threads[1].send([DELIVERED])
    assert scheduler.take() == [BEGUN, DELIVERED, DELIVERED]
    assert scheduler.take() == []
    assert scheduler.ranks == 2


def test_many_events_at_once_arrive_in_order(threads: list[ThreadEnd], scheduler: SchedulerEnd) -> None:
    events = [PrefillBegun(KEY, RequestId(f"r{number}")) for number in range(250)]
    threads[0].send(events)
    assert scheduler.take() == events


def test_nobody_waits_for_a_scheduler_that_does_not_listen(threads: list[ThreadEnd]) -> None:
    for _ in range(10_000):
        threads[0].send([DELIVERED])
    late = SchedulerEnd([threads[0].path])
    for _ in range(10_000):
        threads[0].send([DELIVERED])
    heard = late.take()
    assert 0 < len(heard) < 10_000, "what does not fit is dropped"
    late.close()
    threads[0].send([DELIVERED])


def test_scheduler_goes_on_when_a_rank_ends_or_is_elsewhere(threads: list[ThreadEnd]) -> None:
    scheduler = SchedulerEnd([threads[0].path, threads[1].path, "", "/nowhere/at/all"])
    threads[1].send([DELIVERED])
    threads[0].close()
    assert scheduler.take() == [DELIVERED]
    assert scheduler.take() == []
    assert scheduler.ranks == 4, "so that no request ever seems to have been received by all"
    scheduler.close()


def test_socket_is_for_the_engines_user_alone_and_leaves_nothing_behind() -> None:
    thread = ThreadEnd()
    folder = Path(thread.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    thread.close()
    thread.close()
    assert not folder.exists()


# down ---------------------------------------------------------------------------------------------------
def command(number: int, blocks: int = 3) -> Receive:
    target = Target(Address("10.1.2.3", 5600), EngineId("prefill"))
    ids = (tuple(range(blocks)),)
    return Receive(KEY, RequestId(f"r{number}"), target, Span(0, 16 * blocks), ids, True, Purpose.PROMPT, Mode.PULL)


def test_each_rank_hears_all_commands_as_they_are_and_in_order(
    threads: list[ThreadEnd], scheduler: SchedulerEnd
) -> None:
    digests = digests_of(range(64), b"")
    said: list[Command] = [
        Expect(KEY, NAME, command(0).target),
        Inquire(KEY, NAME, command(0).target, digests),
        command(0),
        Abort(KEY, Reason.NOT_NEEDED),
        Announce(KEY, NAME),
        Final(KEY, NAME, 40, ((1, 2, 3),)),
        Sampled(KEY, NAME, 7),
        Keep(KEY, NAME, 32, ((4, 5),), digests, 2.5),
        Withdraw(KEY, NAME, Reason.PREFILL_ABORTED, "gone"),
    ]
    for each in said:
        assert scheduler.say(each) == {0, 1}
    for thread in threads:
        assert select.select([thread.wake_fd], [], [], 0)[0]
        assert thread.take() == said
        assert not select.select([thread.wake_fd], [], [], 0)[0]


def test_rank_that_does_not_keep_up_is_told_no_more_and_has_missed_none_in_between(
    threads: list[ThreadEnd], scheduler: SchedulerEnd
) -> None:
    heard: list[int] = []
    told: list[frozenset[int]] = []
    for number in range(2000):
        told.append(scheduler.say(command(number, blocks=5000)))
        heard += [int(each.request_id[1:]) for each in threads[0].take() if isinstance(each, Receive)]
    assert heard == list(range(2000))
    by_step = told.index(frozenset({0}))
    assert told == [frozenset({0, 1})] * by_step + [frozenset({0})] * (2000 - by_step)
    assert len(threads[1].take()) == by_step
    assert scheduler.say(command(1)) == {0}, "room again, but what goes with steps must not be overtaken"


def test_command_that_is_too_large_goes_with_a_step_and_so_do_all_after_it(scheduler: SchedulerEnd) -> None:
    assert scheduler.say(command(0, blocks=20_000)) == {0, 1}
    assert scheduler.say(command(1, blocks=200_000)) == set()
    assert scheduler.say(command(2)) == set()


def test_thread_that_has_ended_and_one_elsewhere_are_not_told(threads: list[ThreadEnd]) -> None:
    scheduler = SchedulerEnd([threads[0].path, "", threads[1].path])
    threads[0].close()
    assert scheduler.say(command(0)) == {2}
    assert threads[1].take() == [command(0)]
    scheduler.close()


def test_thread_hears_the_last_words_of_a_scheduler_that_ends_and_then_another_one(threads: list[ThreadEnd]) -> None:
    first = SchedulerEnd([threads[0].path])
    first.say(command(0))
    first.close()
    threads[0].send([DELIVERED])
    assert threads[0].take() == [command(0)]
    assert threads[0].take() == []
    second = SchedulerEnd([threads[0].path])
    second.say(command(1))
    assert threads[0].take() == [command(1)]
    second.close()


@pytest.mark.parametrize("garbage", [b"\xc1", b"\x80", b'{"type": "Abort"}', b"\x81\xa4type\xa4Quit"])
def test_thread_ignores_what_is_no_command_and_goes_on(
    threads: list[ThreadEnd], garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(threads[0].path)
        stranger.send(garbage)
        stranger.send(msgspec.msgpack.encode(command(0)))
        assert threads[0].take() == [command(0)]
    assert "cannot be understood" in caplog.text
