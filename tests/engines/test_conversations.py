"""Conversations on real engines: what the decode engine keeps of a turn is not computed again for the next one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from engines.calls import Ask
from engines.harness import eventually, new_id, prompt_of
from engines.mortal import MortalPair
from engines.talk import Conversation, Turn

from kvpush.sim.orders import EngineConfig

pytestmark = pytest.mark.engine

_TURNS = 6
_BLOCK = 32
_BLOCKS = 100
_KEEP_S = 8.0
_seeds = itertools.count(1)


_PAIRS = [
    pytest.param((True, "push"), id="prefix caches on"),
    pytest.param((False, "push"), id="prefix caches off"),
    pytest.param((False, "pull"), id="pulled", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=_PAIRS)
def pair(tiny: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[MortalPair]:
    """Two engines that may both send and receive. Prompts that do not come fail, and what is kept is kept shortly."""
    caching, mode = request.param
    common = EngineConfig(
        name="",
        model=tiny,
        num_blocks=_BLOCKS,
        max_model_len=(_BLOCKS - 1) * _BLOCK,
        prefix_caching=caching,
        extra={"keep_s": _KEEP_S, "mode": mode},
    )
    folder = tmp_path_factory.mktemp("engines")
    made = MortalPair(folder, replace(common, name="prefill"), replace(common, name="decode"))
    try:
        assert made.prefill.ready
        assert made.decode.ready
        yield made
    finally:
        made.close()


def reference(pair: MortalPair, seed: int, turns: int = _TURNS) -> Conversation:
    """The same conversation with one engine."""
    alone = Conversation(seed)
    for _ in range(turns):
        alone.alone(pair.decode)
    settle(pair)
    return alone


def settle(pair: MortalPair) -> None:
    """Let go of everything."""
    pair.decode.settled()
    pair.forget()


def assert_same(turn: Turn, alone: Conversation) -> None:
    number = next(n for n, each in enumerate(alone.turns) if each.prompt == turn.prompt)
    assert turn.answer == alone.turns[number].answer, f"turn {number} is answered otherwise than by one engine"


def test_prefill_engine_computes_only_what_is_new_in_each_turn(pair: MortalPair) -> None:
    seed = next(_seeds)
    alone, talk = reference(pair, seed), Conversation(seed)
    before = pair.prefill.look().reused

    for _ in range(_TURNS):
        had = talk.turns[-1].left if talk.turns else 0
        turn = talk.turn(pair.prefill, pair.decode)
        assert_same(turn, alone)
        assert had - _BLOCK < turn.not_computed <= had, "all that the decode engine held, to within a block"

    reused = pair.prefill.look().reused - before
    if not pair.prefill.config.prefix_caching:
        assert reused == sum(turn.left for turn in talk.turns[:-1])
    settle(pair)
    pair.assert_nothing_held()


def test_conversations_go_both_ways_at_once(pair: MortalPair) -> None:
    """Each engine prefills one of them and decodes the other."""
    engines = (pair.prefill, pair.decode)
    seeds = (next(_seeds), next(_seeds))
    alone = [reference(pair, seed, 3) for seed in seeds]
    talks = [Conversation(seed) for seed in seeds]
    for _ in range(3):
        legs = [talk.legs(*pairing) for talk, pairing in zip(talks, (engines, engines[::-1]), strict=True)]
        for (first, second, _), (prefill, decode) in zip(legs, (engines, engines[::-1]), strict=True):
            decode.add(second)
            prefill.add(first)
        for talk, (first, second, kept), (prefill, decode) in zip(talks, legs, (engines, engines[::-1]), strict=True):
            had = talk.turns[-1].left if talk.turns else 0
            (prefilled,) = prefill.collect(first)
            (answer,) = decode.collect(second)
            turn = talk.add(second, answer, prefilled, kept)
            assert had - _BLOCK < turn.not_computed
    for talk, expected in zip(talks, alone, strict=True):
        for turn in talk.turns:
            assert_same(turn, expected)
    settle(pair)
    pair.assert_nothing_held()


def test_turn_that_comes_late_is_computed(pair: MortalPair) -> None:
    seed = next(_seeds)
    alone, talk = reference(pair, seed, 2), Conversation(seed)
    talk.turn(pair.prefill, pair.decode)
    eventually(lambda: pair.decode.settled().kept == 0)
    pair.forget()
    assert_computed(pair, talk, alone)


def test_turn_whose_blocks_were_needed_for_others_is_computed(pair: MortalPair) -> None:
    seed = next(_seeds)
    alone, talk = reference(pair, seed, 2), Conversation(seed)
    talk.turn(pair.prefill, pair.decode)
    pair.prefill.forget()
    pair.decode.ask(Ask(request_id=new_id(), prompt=prompt_of((_BLOCKS - 2) * _BLOCK, seed=seed), max_tokens=2))
    assert pair.decode.settled().kept == 0
    assert_computed(pair, talk, alone)


def test_turn_that_says_something_else_uses_what_is_the_same(pair: MortalPair) -> None:
    seed = next(_seeds)
    talk = Conversation(seed)
    first = talk.turn(pair.prefill, pair.decode)
    changed = first.answer[:10] + (7,) * 10
    talk.turns[-1] = replace(first, answer=changed)
    prompt = talk.next_prompt()
    turn = talk.turn(pair.prefill, pair.decode)
    assert 48 - _BLOCK < turn.not_computed <= 48, "45 of the prompt and 10 of the answer are the same"
    settle(pair)
    (plain,) = pair.decode.ask(Ask(request_id=new_id(), prompt=prompt, max_tokens=len(turn.answer)))
    assert turn.answer == plain.tokens
    settle(pair)


def test_turn_whose_decode_engine_was_restarted_is_computed(pair: MortalPair) -> None:
    seed = next(_seeds)
    alone, talk = reference(pair, seed, 2), Conversation(seed)
    talk.turn(pair.prefill, pair.decode)
    pair.prefill.forget()
    pair.decode.kill()
    pair.restart_decode()
    assert_computed(pair, talk, alone)


def assert_computed(pair: MortalPair, talk: Conversation, alone: Conversation) -> None:
    """The next turn is right, and nothing of it was there."""
    turn = talk.turn(pair.prefill, pair.decode)
    assert_same(turn, alone)
    assert turn.not_computed == 0
    settle(pair)
    pair.assert_nothing_held()
