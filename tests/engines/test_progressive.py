"""Prompts that are pushed while they are computed, through two engines, compared token by token with one."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engines.calls import Ask
from engines.harness import Pair, eventually, new_id, prompt_of, running
from engines.mortal import counted

from kvpush.core.events import TransferRecord
from kvpush.runtime.recordfile import read_records
from kvpush.sim.orders import EngineConfig
from kvpush.vllm.settings import Push

pytestmark = pytest.mark.engine

CHUNK = 512
"""Tokens per step of the prefill engine: 8 MiB of KV of the test model."""


@pytest.fixture(scope="module", params=list(Push))
def push(request: pytest.FixtureRequest) -> Push:
    """How the prefill engine pushes."""
    return Push(request.param)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines note how transfers ended."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def pair(tiny: str, push: Push, records: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill engine that cuts prompts into chunks and whose pool is small, and a decode engine with room."""
    extra = {"port": 0, "push": push.value}
    noted = {"KVPUSH_RECORDS": str(records)}
    configs = (
        EngineConfig(
            name="prefill",
            model=tiny,
            role="kv_producer",
            max_model_len=2048,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=8,
            num_blocks=80,
            extra=extra,
            environment=noted,
        ),
        EngineConfig(name="decode", model=tiny, role="kv_consumer", extra=extra),
    )
    with running(tmp_path_factory.mktemp("engines"), *configs) as (first, second):
        yield Pair(first, second)


def sent(pair: Pair, records: Path) -> list[TransferRecord]:
    """What the prefill engine has noted."""
    return read_records(records / f"records-{pair.prefill.ready.pid}.jsonl")


def test_pair_writes_a_prompt_as_early_as_its_setting_says(pair: Pair, push: Push, records: Path) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(1500, seed=1))
    (expected,) = pair.plain(ask)
    before = len(sent(pair, records))
    (answer,) = pair.ask(ask)

    assert answer.tokens == expected.tokens
    pair.assert_nothing_held()
    eventually(lambda: len(sent(pair, records)) > before)
    record = sent(pair, records)[-1]
    early = record.at["first_posted"] < record.at["final"]
    assert early is (push is not Push.WHOLE)
    # 8 MiB per step, in four parts if layer by layer; fewer when the receiver registers in between
    assert {Push.LAYERWISE: 4 <= record.writes <= 12}.get(push, record.writes <= 3), record.writes


def test_pair_answers_as_one_engine_for_each_prompt_length(pair: Pair) -> None:
    lengths = (2, 31, 32, 33, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 33, 1900)
    asks = [Ask(request_id=new_id(), prompt=prompt_of(length, seed=length)) for length in lengths]
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()

    for _ in range(2):  # the second time with hits in both prefix caches
        again = [Ask(request_id=new_id(), prompt=ask.prompt) for ask in asks]
        assert [answer.tokens for answer in pair.ask(*again)] == expected
    pair.assert_nothing_held()


@pytest.mark.parametrize("known", [1, 15, 16, 17, 40])
def test_pair_answers_as_one_engine_when_the_decode_engine_has_a_part(pair: Pair, known: int) -> None:
    prompt = prompt_of(1400, seed=77)
    (expected,) = pair.plain(Ask(request_id=new_id(), prompt=prompt))
    pair.forget()
    pair.decode.ask(Ask(request_id=new_id(), prompt=prompt[: known * 32 + 1], max_tokens=1))

    (answer,) = pair.ask(Ask(request_id=new_id(), prompt=prompt))
    assert answer.tokens == expected.tokens
    pair.assert_nothing_held()


@pytest.mark.long
def test_pair_answers_as_one_engine_while_the_prefill_engine_is_short_of_blocks(pair: Pair) -> None:
    """Prompts and answers of other clients do not fit into the prefill engine at once."""
    lengths = random.Random(3).sample(range(200, 900), 12)
    asks = [Ask(request_id=new_id(), prompt=prompt_of(length, seed=length)) for length in lengths]
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()
    others = [Ask(request_id=new_id(), prompt=prompt_of(300, seed=i), max_tokens=200) for i in range(1000, 1005)]

    pair.prefill.add(*others)
    answers = pair.ask(*[Ask(request_id=new_id(), prompt=ask.prompt) for ask in asks])
    pair.prefill.collect(*others)

    assert [answer.tokens for answer in answers] == expected
    pair.assert_nothing_held()


def test_prompt_preempted_between_two_chunks_is_computed_and_written_again(pair: Pair, push: Push) -> None:
    """It fits beside five others when it is admitted. While it is computed, each of them comes to need one block more,
    and there is none for its last chunk."""
    ask = Ask(request_id=new_id(), prompt=prompt_of(1910, seed=9))
    (expected,) = pair.plain(ask)
    pair.forget()
    before = counted(pair.prefill, "retracted")
    others = [Ask(request_id=new_id(), prompt=prompt_of(94, seed=i), max_tokens=60) for i in range(2000, 2005)]
    prefill, decode = pair.legs(replace(ask, request_id=new_id()))

    pair.decode.add(decode)
    with pair.prefill.held():
        pair.prefill.add(*others, prefill)
    pair.prefill.collect(*others, prefill)
    (answer,) = pair.decode.collect(decode)

    assert answer.tokens == expected.tokens
    pair.assert_nothing_held()
    assert (counted(pair.prefill, "retracted") > before) is (push is not Push.WHOLE)


def test_prompt_aborted_while_it_is_computed_fails_and_leaves_nothing(pair: Pair) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(1900, seed=5))
    prefill, decode = pair.legs(ask)
    pair.decode.add(decode)
    eventually(lambda: pair.decode.look().free_blocks < pair.decode.ready.free_blocks)
    pair.prefill.add(prefill)
    eventually(lambda: pair.prefill.look().free_blocks < pair.prefill.ready.free_blocks)
    pair.prefill.abort(prefill)
    pair.decode.collect(decode)

    pair.assert_nothing_held()
