"""Router processes tell each other of conversations: real sockets, one loop."""

import socket

import pytest
from router.rig import until_true

from kvpush.core.ids import TransferId
from kvpush.router.place import meeting_places
from kvpush.router.siblings import KeptTurn, Siblings

TURN = KeptTurn(b"0123456789abcdef", TransferId("ab" * 16), "http://d:1")


async def test_all_others_hear_of_a_turn() -> None:
    heard: list[list[KeptTurn]] = [[], [], []]
    with meeting_places(3) as places:
        siblings = [Siblings(place, turns.append) for place, turns in zip(places, heard, strict=True)]
        siblings[1].tell(TURN)

        async def all_heard() -> bool:
            return heard == [[TURN], [], [TURN]]

        await until_true(all_heard)
        for one in siblings:
            one.close()


async def test_nobody_is_held_up_by_a_sibling_that_is_gone_or_does_not_listen() -> None:
    with meeting_places(3) as places, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(places[0].turns(1))  # the third was never there
        one = Siblings(places[0], lambda turn: None)
        for _ in range(2000):
            one.tell(TURN)
        one.close()
        one.tell(TURN)


async def test_nonsense_from_a_sibling_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[KeptTurn] = []
    with meeting_places(2) as places, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mad:
        one = Siblings(places[0], heard.append)
        for nonsense in (b"", b"\xc1", b"\x93\x01\x02\x03", bytes(3000)):
            mad.sendto(nonsense, places[0].turns(0))
        other = Siblings(places[1], lambda turn: None)
        other.tell(TURN)

        async def has_heard() -> bool:
            return heard == [TURN]

        await until_true(has_heard)
        assert "makes no sense" in caplog.text
        one.close()
        other.close()
