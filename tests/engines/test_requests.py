"""What clients ask for: several choices and prompts, stop tokens, log probabilities, many at once."""

import random
import time
from dataclasses import replace

import pytest
from engines.calls import Ask
from engines.harness import Pair, eventually, new_id, prompt_of

from kvpush.vllm.lull import LONGEST_MS

pytestmark = pytest.mark.engine


def test_pair_answers_many_requests_at_once_as_one_engine(pair: Pair) -> None:
    lengths = random.Random(7).sample(range(3, 900), 32)
    asks = [
        Ask(request_id=new_id(), prompt=prompt_of(length, seed=length), max_tokens=1 + length % 24)
        for length in lengths
    ]
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()

    answers = []
    for half in (asks[:16], asks[16:]):
        answers += pair.ask(*half)

    assert [answer.tokens for answer in answers] == expected
    assert pair.decode.settled().transfers == {"receiver delivered ok": 32}
    pair.assert_nothing_held()


def test_pair_gives_each_of_several_choices_as_one_engine(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(150, seed=1), n=3, seed=11, temperature=2.0, max_tokens=48)
    (expected,) = pair.plain(ask)
    pair.forget()
    before = pair.decode.settled().transfers.get("receiver delivered ok", 0)

    (answer,) = pair.ask(replace(ask, request_id=new_id()))

    assert len(answer.choices) == 3
    assert answer.choices == expected.choices
    assert pair.decode.settled().transfers["receiver delivered ok"] == before + 3
    pair.assert_nothing_held()


def test_pair_answers_a_list_of_prompts_under_one_transfer_id(pair: Pair) -> None:
    prompts = [prompt_of(length, seed=length) for length in (20, 77, 310)]
    asks = [Ask(request_id=f"cmpl-list-{index}", prompt=prompt) for index, prompt in enumerate(prompts)]
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()
    # one API request: the same parameters for all of its prompts, and ids that differ between the engines
    prefill, decode = pair.legs(asks[0])
    prefills = [
        replace(ask, request_id=f"cmpl-p-{i}", max_tokens=1, params=prefill.params) for i, ask in enumerate(asks)
    ]
    decodes = [replace(ask, request_id=f"cmpl-d-{i}", params=decode.params) for i, ask in enumerate(asks)]
    before = pair.decode.settled().transfers["receiver delivered ok"]

    pair.prefill.add(*reversed(prefills))
    answers = pair.decode.ask(*decodes)
    pair.prefill.collect(*prefills)

    assert [answer.tokens for answer in answers] == expected
    assert pair.decode.settled().transfers["receiver delivered ok"] == before + 3
    pair.assert_nothing_held()


def test_prompt_whose_first_token_ends_the_request_ends_on_the_decode_engine(pair: Pair) -> None:
    plain = Ask(request_id=new_id(), prompt=prompt_of(90, seed=2))
    (free,) = pair.plain(plain)
    stopping = replace(plain, stop_token_ids=(free.tokens[0],))
    (expected,) = pair.plain(stopping)
    assert expected.choices[0].finish_reason == "stop"

    for leg_stops in ((), stopping.stop_token_ids):
        pair.forget()
        prefill, decode = pair.legs(replace(stopping, request_id=new_id()))
        pair.decode.add(decode)
        pair.prefill.ask(replace(prefill, stop_token_ids=leg_stops, max_tokens=5))
        (answer,) = pair.decode.collect(decode)
        assert answer.choices == expected.choices
    pair.assert_nothing_held()


def test_log_probabilities_are_those_of_one_engine(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(130, seed=3), logprobs=5)
    (expected,) = pair.plain(ask)
    pair.forget()

    (answer,) = pair.ask(replace(ask, request_id=new_id()))

    assert answer.tokens == expected.tokens
    assert answer.choices[0].logprobs == pytest.approx(expected.choices[0].logprobs, abs=1e-2)


def test_request_that_must_not_read_caches_is_computed_by_the_decode_engine(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(130, seed=4), skip_prefix_cache=True)
    (expected,) = pair.plain(ask)
    before = pair.decode.settled().nbytes

    (answer,) = pair.ask(replace(ask, request_id=new_id()))

    assert answer.tokens == expected.tokens
    assert pair.decode.settled().nbytes == before
    pair.assert_nothing_held()


def test_engines_stay_usable_after_parameters_that_make_no_sense(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(60, seed=5))
    (expected,) = pair.plain(ask)
    key = pair.legs(ask)[0].params or {}

    for params in ({"do_remote_prefill": True}, {**key, "do_remote_decode": "maybe"}, {**key, "attempt": 2**40}):
        (answer,) = pair.decode.ask(replace(ask, request_id=new_id(), params=params))
        assert answer.tokens == expected.tokens

    (answer,) = pair.ask(replace(ask, request_id=new_id()))
    assert answer.tokens == expected.tokens
    pair.assert_nothing_held()


def test_decode_engine_takes_few_steps_while_a_request_waits(pair: Pair) -> None:
    prefill, decode = pair.legs(Ask(request_id=new_id(), prompt=prompt_of(70, seed=6)))
    (expected,) = pair.plain(replace(decode, params=None))
    pair.decode.add(decode)
    eventually(lambda: pair.decode.look().free_blocks < pair.decode.ready.free_blocks)

    began, before = time.monotonic(), pair.decode.look().steps
    eventually(lambda: pair.decode.look().steps > before + 200)
    took_s = time.monotonic() - began
    pair.prefill.ask(prefill)
    (answer,) = pair.decode.collect(decode)

    assert took_s > 150 * LONGEST_MS / 1000
    assert answer.tokens == expected.tokens
    pair.assert_nothing_held()
