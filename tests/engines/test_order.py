"""Registration and prompt may come in either order."""

import pytest
from engines.calls import Ask
from engines.harness import Pair, eventually, new_id, prompt_of

pytestmark = pytest.mark.engine


def test_push_is_delivered_when_registered_before_the_prompt_is_computed(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(300, seed=1))
    (expected,) = pair.plain(ask)
    prefill, decode = pair.legs(ask)

    with pair.prefill.held():
        pair.decode.add(decode)
        eventually(lambda: pair.decode.look().free_blocks < pair.decode.ready.free_blocks)
        pair.prefill.add(prefill)
    (answer,) = pair.decode.collect(decode)

    assert answer.tokens == expected.tokens
    pair.prefill.collect(prefill)
    pair.assert_nothing_held()


def test_push_is_delivered_when_registered_after_the_prompt_is_computed(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(300, seed=2))
    (expected,) = pair.plain(ask)
    prefill, decode = pair.legs(ask)

    pair.prefill.ask(prefill)
    held = pair.prefill.look()
    assert held.free_blocks < pair.prefill.ready.free_blocks, "the prompt's blocks must wait for their receiver"
    (answer,) = pair.decode.ask(decode)

    assert answer.tokens == expected.tokens
    pair.assert_nothing_held()


def test_router_that_runs_the_legs_one_after_the_other_relays_what_it_needs(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(200, seed=3))
    (expected,) = pair.plain(ask)
    prefill, decode = pair.legs(ask)

    (first,) = pair.prefill.ask(prefill)
    relayed = Ask(request_id=decode.request_id, prompt=ask.prompt, params=first.params)
    (answer,) = pair.decode.ask(relayed)

    assert answer.tokens == expected.tokens
    assert pair.decode.settled().transfers["receiver delivered ok"] == 3
    pair.assert_nothing_held()
