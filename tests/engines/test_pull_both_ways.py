"""Pull over sockets between two engines that read from each other: a client that leaves during a READ, and a turn that
goes on from another."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engines.calls import Ask
from engines.harness import Pair, eventually, new_id, prompt_of, running
from engines.talk import Conversation

from kvpush.sim.orders import EngineConfig

pytestmark = pytest.mark.engine

_BLOCK, _BLOCKS = 32, 64
_LONGEST = (_BLOCKS - 3) * _BLOCK
"""Tokens of a prompt that takes nearly all of a pool: 30 MiB of KV of the test model."""


@pytest.fixture(scope="module")
def pair(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Without prefix caches, and with a READ that takes its time: over sockets nothing is copied while it is posted."""
    common = EngineConfig(
        name="",
        model=tiny,
        num_blocks=_BLOCKS,
        max_model_len=(_BLOCKS - 1) * _BLOCK,
        prefix_caching=False,
        environment={"UCX_TLS": "tcp"},
        extra={"port": 0, "mode": "pull"},
    )
    configs = (replace(common, name="prefill"), replace(common, name="decode"))
    with running(tmp_path_factory.mktemp("engines"), *configs) as (first, second):
        yield Pair(first, second)


def test_next_turn_of_a_conversation_is_pulled_back(pair: Pair) -> None:
    alone, talk = Conversation(1), Conversation(1)
    expected = [alone.alone(pair.decode).answer for _ in range(2)]

    turns = [talk.turn(pair.prefill, pair.decode) for _ in range(2)]

    assert [turn.answer for turn in turns] == expected
    assert turns[1].not_computed == turns[0].left, "all that the decode engine held"
    assert pair.prefill.settled().delivered["receiver pull"] == 1
    pair.forget()
    pair.assert_nothing_held()


def test_blocks_of_a_client_that_leaves_during_a_read_are_not_used_before_it_has_stopped(pair: Pair) -> None:
    """The next prompt needs the same blocks: bytes that land late would be in its text."""
    (expected,) = pair.plain(Ask(request_id=new_id(), prompt=prompt_of(_LONGEST, seed=2)))

    def left_during_a_read() -> bool:
        before = pair.decode.settled().transfers.get("receiver failed aborted", 0)
        prefill, decode = pair.legs(Ask(request_id=new_id(), prompt=prompt_of(_LONGEST, seed=3)))
        pair.prefill.ask(prefill)
        pair.decode.add(decode)
        eventually(lambda: (state := pair.decode.look()).writes > 0 or not state.requests)
        is_reading = pair.decode.look().writes > 0
        pair.decode.abort(decode)
        (answer,) = pair.decode.ask(Ask(request_id=new_id(), prompt=prompt_of(_LONGEST, seed=2)))
        assert answer.tokens == expected.tokens
        return is_reading and pair.decode.settled().transfers.get("receiver failed aborted", 0) > before

    eventually(left_during_a_read)
    pair.assert_nothing_held()
