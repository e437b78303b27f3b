"""Pools too small for what arrives, and clients that leave in masses: everything ends, right, and nothing is kept."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from engines.calls import Ask
from engines.harness import Pair, new_id, prompt_of
from engines.mortal import TIMES

pytestmark = pytest.mark.engine

_ARRIVING = 40
_PROMPT = 90
_ROOM_FOR_24 = {"num_blocks": 24 * 3 + 1, "max_model_len": 512, "max_num_seqs": 64}
_ROOM_FOR_8 = {**_ROOM_FOR_24, "num_blocks": 8 * 3 + 1}
_ROOM_FOR_2 = {"num_blocks": 2 * 3 + 1, "max_model_len": 192}
_ROOM_FOR_3 = {"num_blocks": 3 * 3 + 1, "max_model_len": 192}
_EXTRA = {**TIMES, "port": 0}


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(({}, _ROOM_FOR_24), id="decode"),
        pytest.param((_ROOM_FOR_8, _ROOM_FOR_24), id="both"),
    ],
    indirect=True,
)
def test_prompts_that_do_not_fit_at_once_all_end_with_the_right_text(pair: Pair) -> None:
    asks = _asks(_ARRIVING, seed=1)
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()

    answers = pair.ask(*(replace(ask, request_id=new_id()) for ask in asks))

    assert [answer.tokens for answer in answers] == expected
    assert pair.decode.settled().transfers == {"receiver delivered ok": _ARRIVING}
    pair.assert_nothing_held()


@pytest.mark.parametrize("pair", [(_ROOM_FOR_2, _ROOM_FOR_3)], indirect=True)
def test_two_full_pools_do_not_wait_for_each_other(pair: Pair) -> None:
    """The decode engine gets the requests in one order, the prefill engine in another: what each could hold first is
    not what the other one has room for."""
    asks = _asks(8, seed=3)
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()
    legs = [pair.legs(replace(ask, request_id=new_id())) for ask in asks]
    first, last = legs[:4], legs[4:]

    pair.decode.add(*(decode for _, decode in first))
    pair.prefill.ask(*(prefill for prefill, _ in last[:2]))
    pair.decode.add(*(decode for _, decode in last))
    pair.prefill.add(*(prefill for prefill, _ in [*last[2:], *first]))
    answers = pair.decode.collect(*(decode for _, decode in legs))

    assert [answer.tokens for answer in answers] == expected
    pair.prefill.collect(*(prefill for prefill, _ in [*last[2:], *first]))
    pair.assert_nothing_held()


@pytest.mark.parametrize("pair", [({"extra": _EXTRA}, {"extra": _EXTRA})], indirect=True)
class TestAbortStorm:
    """Nine of ten clients leave within moments."""

    def test_pair_serves_as_before_after_most_clients_have_left(self, pair: Pair) -> None:
        _storm(pair, 60)

        asks = _asks(16, seed=2)
        expected = [answer.tokens for answer in pair.plain(*asks)]
        answers = pair.ask(*(replace(ask, request_id=new_id()) for ask in asks))
        assert [answer.tokens for answer in answers] == expected
        pair.assert_nothing_held()


def _storm(pair: Pair, clients: int) -> None:
    """So many requests in flight, of which nine in ten are aborted in random order, whatever stage they are in."""
    asks = _asks(clients, seed=clients)
    legs = [pair.legs(ask) for ask in asks]
    leaving = random.Random(clients).sample(legs, clients * 9 // 10)
    staying = [leg for leg in legs if leg not in leaving]
    for prefill, decode in legs:
        pair.decode.add(decode)
        pair.prefill.add(prefill)
    for prefill, decode in leaving:
        pair.decode.abort(decode)
        pair.prefill.abort(prefill)
    pair.prefill.collect(*(prefill for prefill, _ in legs))
    answers = pair.decode.collect(*(decode for _, decode in staying))
    pair.decode.collect(*(decode for _, decode in leaving))

    assert len(answers) == len(staying)
    pair.assert_nothing_held()
    expected = pair.plain(*(ask for ask in asks if any(ask.request_id == decode.request_id for _, decode in staying)))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected], "I2: wrong text"


def _asks(count: int, seed: int) -> Sequence[Ask]:
    return [
        Ask(request_id=new_id(), prompt=prompt_of(_PROMPT + i % 6, seed=seed * 1000 + i), max_tokens=24)
        for i in range(count)
    ]
