"""The thread that owns a transport."""

import threading

import pytest

from kvpush.core.errors import LocalProtocolError
from kvpush.transport.owner import Owner


def in_thread(call: object) -> None:
    assert callable(call)
    thread = threading.Thread(target=call, name="maker")
    thread.start()
    thread.join()


def test_owner_may_call() -> None:
    Owner().check("poll")


def test_other_thread_is_named_in_the_refusal() -> None:
    owner, caught = Owner(), []

    def call() -> None:
        with pytest.raises(LocalProtocolError, match="poll: called from thread maker, but MainThread owns it") as error:
            owner.check("poll")
        caught.append(error)

    in_thread(call)
    assert caught


def test_anyone_may_clean_up_after_an_owner_that_has_ended() -> None:
    made: list[Owner] = []
    in_thread(lambda: made.append(Owner()))
    made[0].check("close")
