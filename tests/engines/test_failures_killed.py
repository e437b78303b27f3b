"""Engines that are killed, come back, or are stopped for a while; the other one goes on in the same process."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from engines.calls import Answer, Ask, Go, Hold
from engines.harness import eventually, new_id, prompt_of
from engines.mortal import MortalPair, counted, failed, stopped

from kvpush.sim.orders import EngineConfig

pytestmark = pytest.mark.engine

_CHUNK = 128


@pytest.fixture(scope="module", params=["recompute", "fail"])
def pair(tiny: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[MortalPair]:
    common = EngineConfig(name="", model=tiny, num_blocks=400)
    made = MortalPair(
        tmp_path_factory.mktemp("engines"),
        replace(common, name="prefill", role="kv_producer", max_num_batched_tokens=_CHUNK),
        replace(common, name="decode", role="kv_consumer", failure_policy=request.param),
    )
    try:
        made.assert_serves()
        yield made
    finally:
        made.close()


def test_decode_engine_outlives_a_killed_prefill_engine_and_uses_its_successor(pair: MortalPair) -> None:
    asks = _asks(10, length=100)
    expected = pair.plain(*asks)
    legs = [pair.legs(ask) for ask in asks]
    before = _abnormal(pair)

    pair.prefill.call(Hold())
    pair.prefill.add(*(prefill for prefill, _ in legs))
    pair.decode.add(*(decode for _, decode in legs))
    eventually(lambda: _registered(pair, legs))
    pair.prefill.kill()
    answers = pair.decode.collect(*(decode for _, decode in legs))

    _assert_by_policy(pair, answers, expected)
    state = pair.decode.settled()
    assert state.free_blocks == pair.decode.ready.free_blocks, "I1: the blocks come back after the quarantine"
    after = _abnormal(pair)
    assert [now - then for now, then in zip(after, before, strict=True)] == [10, 10, 1], "I5: each is counted once"

    _assert_prompt_is_answered_from_its_cache(pair)
    pair.restart_prefill()
    pair.assert_serves()


def _assert_prompt_is_answered_from_its_cache(pair: MortalPair) -> None:
    """A decode engine that has the whole prompt needs no prefill engine."""
    ask = Ask(request_id=new_id(), prompt=prompt_of(97, seed=77))
    _, decode = pair.legs(ask)
    pair.decode.forget()
    (expected,) = pair.decode.ask(replace(ask, request_id=new_id()))
    before = failed(pair.decode)

    (answer,) = pair.decode.ask(decode)

    assert answer.tokens == expected.tokens
    assert failed(pair.decode) == before, "nothing was asked for"


def test_prefill_engine_outlives_a_killed_decode_engine_and_serves_its_successor(pair: MortalPair) -> None:
    finished, registered = _asks(3, length=120), _asks(3, length=200)
    legs = [pair.legs(ask) for ask in registered]
    pair.prefill.ask(*(pair.legs(ask)[0] for ask in finished))
    assert pair.prefill.look().free_blocks < pair.prefill.ready.free_blocks

    pair.prefill.call(Hold())
    pair.decode.add(*(decode for _, decode in legs))
    eventually(lambda: _registered(pair, legs))
    pair.decode.kill()
    pair.prefill.add(*(prefill for prefill, _ in legs))
    pair.prefill.call(Go())
    pair.prefill.collect(*(prefill for prefill, _ in legs))

    state = pair.prefill.settled()
    assert state.free_blocks == pair.prefill.ready.free_blocks, "I1: nobody will fetch the prompts any more"
    assert not state.open_transfers
    pair.restart_decode()
    pair.assert_serves()


def test_decode_engine_does_not_wait_for_a_prefill_engine_that_is_stopped(pair: MortalPair) -> None:
    asks = _asks(4, length=150)
    expected = pair.plain(*asks)
    legs = [pair.legs(ask) for ask in asks]
    pair.prefill.call(Hold())
    pair.prefill.add(*(prefill for prefill, _ in legs))
    pair.decode.add(*(decode for _, decode in legs))
    eventually(lambda: _registered(pair, legs))

    with stopped(pair.prefill):
        answers = pair.decode.collect(*(decode for _, decode in legs))
        assert pair.decode.settled().free_blocks == pair.decode.ready.free_blocks
    pair.prefill.call(Go())
    pair.prefill.collect(*(prefill for prefill, _ in legs))

    _assert_by_policy(pair, answers, expected)
    pair.assert_serves()


def test_prefill_engine_does_not_wait_for_a_decode_engine_that_is_stopped(pair: MortalPair) -> None:
    asks = _asks(4, length=150)
    expected = pair.plain(*asks)
    legs = [pair.legs(ask) for ask in asks]
    pair.prefill.call(Hold())
    pair.prefill.add(*(prefill for prefill, _ in legs))
    pair.decode.add(*(decode for _, decode in legs))
    eventually(lambda: _registered(pair, legs))

    with stopped(pair.decode):
        pair.prefill.call(Go())
        pair.prefill.collect(*(prefill for prefill, _ in legs))
        assert pair.prefill.settled().free_blocks == pair.prefill.ready.free_blocks
    answers = pair.decode.collect(*(decode for _, decode in legs))

    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.tokens == wanted.tokens or answer.choices[0].finish_reason == "error"
    pair.assert_serves()


def test_decode_engine_is_told_of_a_prefill_that_is_aborted_between_its_chunks(pair: MortalPair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(30 * _CHUNK, seed=5))
    (expected,) = pair.plain(ask)
    prefill, decode = pair.legs(ask)
    before = _failed_with(pair, "prefill_aborted")

    pair.decode.add(decode)
    pair.prefill.add(prefill)
    eventually(lambda: pair.prefill.look().free_blocks < pair.prefill.ready.free_blocks)
    pair.prefill.abort(prefill)
    (answer,) = pair.decode.collect(decode)

    _assert_by_policy(pair, [answer], [expected])
    assert _failed_with(pair, "prefill_aborted") == before + 1
    pair.assert_serves()


def test_client_that_leaves_while_its_answer_is_decoded_takes_its_blocks_with_it(pair: MortalPair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=6), max_tokens=3000)
    prefill, decode = pair.legs(ask)

    pair.decode.add(decode)
    pair.prefill.ask(prefill)
    eventually(lambda: not pair.prefill.look().open_transfers)
    pair.decode.abort(decode)

    pair.assert_nothing_held()


def _asks(count: int, length: int) -> list[Ask]:
    return [Ask(request_id=new_id(), prompt=prompt_of(length + i, seed=length + i)) for i in range(count)]


def _registered(pair: MortalPair, legs: Sequence[tuple[Ask, Ask]]) -> bool:
    """Whether the decode engine has blocks for all of these prompts, and so has asked for them."""
    size = pair.decode.config.block_size
    wanted = sum(-(-len(decode.prompt) // size) for _, decode in legs)
    return pair.decode.ready.free_blocks - pair.decode.look().free_blocks >= wanted


def _abnormal(pair: MortalPair) -> tuple[int, int, int]:
    """What the decode engine has counted: failed receives, abandoned ones, and peers that it had and has lost."""
    lost = counted(pair.decode, "peer_lost")
    return failed(pair.decode), counted(pair.decode, "recv_abandoned"), lost


def _failed_with(pair: MortalPair, reason: str) -> int:
    return pair.decode.look().transfers.get(f"receiver failed {reason}", 0)


def _assert_by_policy(pair: MortalPair, answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Each is the reference text, or an error without any: as the policy says."""
    if pair.decode.config.failure_policy == "recompute":
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    else:
        assert {(answer.choices[0].finish_reason, answer.tokens) for answer in answers} == {("error", ())}
