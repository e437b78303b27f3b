"""Pull on real engines: sequential routers, the choice of mode, clients that leave, engines that are killed."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engines.calls import Ask, Go, Hold
from engines.harness import eventually, new_id, prompt_of
from engines.mortal import MortalPair, failed

from kvpush.core.mode import SAMPLES, Mode
from kvpush.sim.orders import EngineConfig

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pair(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalPair]:
    """Both engines can push and pull; what fails is computed by the decode engine."""
    common = EngineConfig(name="", model=tiny, num_blocks=400, extra={"mode": "auto"})
    made = MortalPair(
        tmp_path_factory.mktemp("engines"),
        replace(common, name="prefill", role="kv_producer"),
        replace(common, name="decode", role="kv_consumer", failure_policy="recompute"),
    )
    try:
        yield made
    finally:
        made.close()


def test_params_in_the_prefill_answer_are_all_that_a_sequential_router_needs(pair: MortalPair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=1))
    (expected,) = pair.plain(ask)
    prefill, _ = pair.legs(ask)

    (answer,) = pair.prefill.ask(prefill)
    assert answer.params is not None
    (received,) = pair.decode.ask(replace(ask, request_id=new_id(), params={**answer.params, "mode": "pull"}))

    assert received.tokens == expected.tokens
    assert pair.decode.settled().delivered["receiver pull"] == 1
    pair.assert_nothing_held()


def test_pair_that_can_do_both_measures_each_and_says_what_it_has_chosen(pair: MortalPair) -> None:
    asks = [Ask(request_id=new_id(), prompt=prompt_of(200, seed=20 + i)) for i in range(5)]
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()

    answers = [pair.ask(replace(ask, request_id=new_id()))[0].tokens for ask in asks]

    assert answers == expected
    state = pair.decode.settled()
    assert min(state.delivered["receiver push"], state.delivered["receiver pull"]) >= SAMPLES, "both are tried"
    assert [mode in set(Mode) for mode in state.chosen.values()] == [True]
    pair.assert_nothing_held()


@pytest.mark.parametrize("finished", [True, False], ids=["prefill finished", "prefill waits"])
def test_client_that_leaves_takes_its_blocks_with_it(pair: MortalPair, finished: bool) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(200, seed=30 + finished))
    prefill, decode = pair.legs(ask, Mode.PULL)
    if finished:
        pair.prefill.ask(prefill)
        with pair.decode.held():
            pair.decode.add(decode)
            pair.decode.abort(decode)
    else:
        with pair.prefill.held():
            pair.prefill.add(prefill)
            pair.decode.add(decode)
            eventually(lambda: pair.decode.look().free_blocks < pair.decode.ready.free_blocks)
            pair.decode.abort(decode)
        pair.prefill.collect(prefill)
    pair.assert_nothing_held()


def test_prompt_whose_lease_has_ended_is_computed_though_its_blocks_hold_another(pair: MortalPair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(200, seed=35))
    (expected,) = pair.plain(ask)
    prefill, decode = pair.legs(replace(ask, request_id=new_id()), Mode.PULL)
    before = failed(pair.decode)

    pair.prefill.ask(prefill)
    eventually(lambda: pair.prefill.look().free_blocks == pair.prefill.ready.free_blocks)
    pair.forget()
    pair.prefill.ask(Ask(request_id=new_id(), prompt=prompt_of(200, seed=36)))
    (answer,) = pair.decode.ask(decode)

    assert answer.tokens == expected.tokens
    assert failed(pair.decode) == before + 1
    pair.assert_nothing_held()


def test_many_prompts_at_once_give_the_same_texts(pair: MortalPair) -> None:
    asks = [Ask(request_id=new_id(), prompt=prompt_of(40 + 17 * i, seed=40 + i)) for i in range(16)]
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()
    legs = [pair.legs(replace(ask, request_id=new_id()), Mode.PULL) for ask in asks]

    pair.decode.add(*(decode for _, decode in legs))
    pair.prefill.add(*(prefill for prefill, _ in legs))
    pair.prefill.collect(*(prefill for prefill, _ in legs))

    assert [answer.tokens for answer in pair.decode.collect(*(decode for _, decode in legs))] == expected
    pair.assert_nothing_held()


def test_decode_engine_outlives_a_killed_prefill_engine_and_pulls_from_its_successor(pair: MortalPair) -> None:
    asks = [Ask(request_id=new_id(), prompt=prompt_of(100 + i, seed=70 + i)) for i in range(4)]
    expected = [answer.tokens for answer in pair.plain(*asks)]
    legs = [pair.legs(replace(ask, request_id=new_id()), Mode.PULL) for ask in asks]
    before = failed(pair.decode)

    pair.prefill.call(Hold())
    pair.decode.add(*(decode for _, decode in legs))
    eventually(lambda: pair.decode.look().free_blocks < pair.decode.ready.free_blocks)
    pair.prefill.kill()
    answers = pair.decode.collect(*(decode for _, decode in legs))

    assert [answer.tokens for answer in answers] == expected
    assert failed(pair.decode) == before + len(asks)
    pair.restart_prefill()
    _pull_once(pair)


def test_prefill_engine_outlives_a_killed_decode_engine(pair: MortalPair) -> None:
    prefill, decode = pair.legs(Ask(request_id=new_id(), prompt=prompt_of(200, seed=80)), Mode.PULL)
    pair.prefill.call(Hold())
    pair.decode.add(decode)
    eventually(lambda: pair.decode.look().free_blocks < pair.decode.ready.free_blocks)
    pair.decode.kill()
    pair.prefill.add(prefill)
    pair.prefill.call(Go())
    pair.prefill.collect(prefill)

    state = pair.prefill.settled()
    assert state.free_blocks == pair.prefill.ready.free_blocks, "I1: nobody will fetch the prompt any more"
    pair.restart_decode()
    _pull_once(pair)


def _pull_once(pair: MortalPair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(90, seed=99))
    (expected,) = pair.plain(ask)
    prefill, decode = pair.legs(replace(ask, request_id=new_id()), Mode.PULL)
    pair.prefill.ask(prefill)
    before = pair.decode.settled().delivered.get("receiver pull", 0)
    (answer,) = pair.decode.ask(decode)
    assert answer.tokens == expected.tokens
    assert pair.decode.settled().delivered["receiver pull"] == before + 1
    pair.assert_nothing_held()
