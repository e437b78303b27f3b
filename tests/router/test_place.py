"""Where router processes on one port meet."""

import stat
from pathlib import Path

from kvpush.router.place import Place, meeting_places


def test_meeting_place_is_for_this_user_only_and_does_not_stay() -> None:
    with meeting_places(3) as places:
        folder = Path(places[0].folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_each_worker_knows_the_others_and_agrees_with_them_on_their_sockets() -> None:
    with meeting_places(3) as places:
        assert [place.others for place in places] == [(1, 2), (0, 2), (0, 1)]
        assert [place.is_first for place in places] == [True, False, False]
        for number in range(3):
            assert len({place.turns(number) for place in places}) == 1
            assert len({place.questions(number) for place in places}) == 1


def test_worker_that_is_alone_is_the_first_and_has_no_others() -> None:
    assert Place().is_first
    assert Place().others == ()
