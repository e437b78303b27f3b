"""A decode engine that begins with the prefill engine's token answers as one engine does, token by token."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engines.calls import Ask
from engines.harness import Pair, new_id, prompt_of, running

from kvpush.sim.orders import EngineConfig
from kvpush.vllm.settings import Push

pytestmark = pytest.mark.engine

_CHUNK = 512
_LENGTHS = (2, 31, 32, 33, 100, 1300)
_SCHEDULER = "kvpush.vllm.first_token_scheduler.FirstTokenScheduler"


@pytest.fixture(scope="module", params=list(Push))
def pair(tiny: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A prefill engine that cuts prompts into chunks, and a decode engine whose scheduler begins with its tokens."""
    extra = {"port": 0, "push": request.param.value}
    common = EngineConfig(name="", model=tiny, extra=extra, max_model_len=2048, num_blocks=400)
    configs = (
        replace(common, name="prefill", role="kv_producer", max_num_batched_tokens=_CHUNK),
        replace(common, name="decode", role="kv_consumer", scheduler_cls=_SCHEDULER),
    )
    with running(tmp_path_factory.mktemp("engines"), *configs) as (first, second):
        yield Pair(first, second)


def counted(pair: Pair) -> dict[str, int]:
    """What became of the first tokens so far."""
    return {
        name.partition(" ")[2]: number
        for name, number in pair.decode.settled().counted.items()
        if name.startswith("first_token ")
    }


def more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What has been counted in between."""
    return {name: number - before.get(name, 0) for name, number in after.items() if number > before.get(name, 0)}


def test_answers_are_those_of_one_engine_for_every_length_and_ending(pair: Pair) -> None:
    asks = [
        Ask(request_id=new_id(), prompt=prompt_of(length, seed=length), max_tokens=tokens)
        for length in _LENGTHS
        for tokens in (1, 12)
    ]
    expected = pair.plain(*asks)
    asks += [
        replace(ask, request_id=new_id(), stop_token_ids=(answer.tokens[0],))
        for ask, answer in zip(asks, expected, strict=True)
        if ask.max_tokens > 1
    ]
    expected = pair.plain(*asks)
    pair.forget()
    before = counted(pair)

    answers = pair.ask(*(replace(ask, request_id=new_id()) for ask in asks))

    assert [answer.choices for answer in answers] == [answer.choices for answer in expected]
    assert {answer.choices[0].finish_reason for answer in answers} == {"length", "stop"}
    assert more(before, counted(pair)) == {"ok": len(asks)}
    pair.assert_nothing_held()


def test_answers_are_those_of_one_engine_when_the_decode_engine_has_a_part(pair: Pair) -> None:
    prompt = prompt_of(1300, seed=78)
    (expected,) = pair.plain(Ask(request_id=new_id(), prompt=prompt))
    pair.forget()
    before = counted(pair)
    for known in (1, 15, 16, 17, 40):
        pair.decode.forget()
        pair.decode.ask(Ask(request_id=new_id(), prompt=prompt[: known * 32 + 1], max_tokens=1))
        (answer,) = pair.ask(Ask(request_id=new_id(), prompt=prompt))
        assert answer.tokens == expected.tokens
    assert more(before, counted(pair)) == {"ok": 5}
    pair.assert_nothing_held()


def test_requests_that_cannot_begin_so_are_sampled_by_the_decode_engine(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(90, seed=9), max_tokens=8)
    asks = [
        replace(ask, request_id=new_id(), seed=11, temperature=0.9),
        replace(ask, request_id=new_id(), logprobs=2),
        replace(ask, request_id=new_id(), prompt=prompt_of(1)),
    ]
    expected = pair.plain(*asks)
    before = counted(pair)

    answers = [pair.ask(replace(each, request_id=new_id()))[0] for each in asks]

    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert more(before, counted(pair)) == {"seed": 1, "logprobs": 1, "ok": 1}
    pair.assert_nothing_held()


def test_prompt_of_which_only_the_last_token_is_missing_begins_with_the_token_that_was_sampled(pair: Pair) -> None:
    """One block, and one token more: what the decode engine has of it is all that it can reuse."""
    ask = Ask(request_id=new_id(), prompt=prompt_of(33, seed=8), max_tokens=6)
    (expected,) = pair.plain(ask)
    before = counted(pair)

    answers = [pair.ask(replace(ask, request_id=new_id()))[0] for _ in range(2)]

    assert [answer.tokens for answer in answers] == [expected.tokens] * 2
    assert more(before, counted(pair)) == {"ok": 2}
    pair.assert_nothing_held()


def test_sampled_answer_begins_with_the_token_that_was_sampled_for_it(pair: Pair) -> None:
    """The prefill engine has a seed, and so is known to sample what one engine with that seed would."""
    ask = Ask(request_id=new_id(), prompt=prompt_of(60, seed=4), max_tokens=8, temperature=1.0, seed=3)
    (expected,) = pair.plain(ask)
    prefill, decode = pair.legs(replace(ask, request_id=new_id()))

    pair.decode.add(replace(decode, seed=None))
    pair.prefill.ask(prefill)
    (answer,) = pair.decode.collect(decode)

    assert answer.tokens[0] == expected.tokens[0]
    assert len(answer.tokens) == 8
    pair.assert_nothing_held()


def test_requests_preempted_after_their_first_tokens_answer_as_one_engine(pair: Pair) -> None:
    asks = [Ask(request_id=new_id(), prompt=prompt_of(600 + i, seed=i), max_tokens=160) for i in range(20)]
    expected = pair.plain(*asks)
    pair.forget()

    answers = pair.ask(*(replace(ask, request_id=new_id()) for ask in asks))

    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    pair.assert_nothing_held()
