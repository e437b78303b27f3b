from dataclasses import dataclass, field

import pytest

from kvpush.sim.batch import Batch, cost_tokens


@dataclass
class SamplingParams:
    """As much of vLLM's `SamplingParams` as the worker reads."""

    max_tokens: int | None = 3


@dataclass
class New:
    """As much of vLLM's `NewRequestData` as the worker reads."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    sampling_params: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class Cached:
    """As much of vLLM's `CachedRequestData` as the worker reads."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Output:
    """As much of vLLM's `SchedulerOutput` as the worker reads."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    finished_req_ids: set[str] = field(default_factory=set)


@pytest.fixture
def batch() -> Batch:
    return Batch()


def test_whole_prompt_in_one_step_samples(batch: Batch) -> None:
    [row] = batch.rows(Output({"a": 3}, [New("a", [5, 6, 7], ([1],))]))
    assert (row.start, row.end, row.samples, row.unchecked) == (0, 3, True, range(0))
    assert row.tokens.between(0, 9).tolist() == [5, 6, 7]


def test_chunks_of_a_prompt_sample_with_the_last(batch: Batch) -> None:
    [first] = batch.rows(Output({"a": 2}, [New("a", [5, 6, 7], ([1],))]))
    [last] = batch.rows(Output({"a": 1}, scheduled_cached_reqs=Cached(["a"], [([2],)], [2])))
    assert (first.samples, last.samples) == (False, True)
    assert first.blocks.tolist() == [1]
    assert last.blocks.tolist() == [1, 2]


def test_decode_steps_sample_each_time_and_keep_their_blocks(batch: Batch) -> None:
    batch.rows(Output({"a": 3}, [New("a", [5, 6, 7], ([1],))]))
    for computed in (3, 4):
        [row] = batch.rows(Output({"a": 1}, scheduled_cached_reqs=Cached(["a"], [None], [computed])))
        assert (row.start, row.samples, len(row.unchecked)) == (computed, True, 0)


@pytest.mark.parametrize(("outputs", "shares"), [(1, [8]), (3, [3, 3, 2]), (100, [1] * 8), (None, [8])])
def test_loaded_tokens_are_checked_over_the_steps_that_sample(
    batch: Batch, outputs: int | None, shares: list[int]
) -> None:
    new = New("a", list(range(10, 20)), ([1, 2],), 8, SamplingParams(outputs))
    [chunk] = batch.rows(Output({"a": 1}, [new]))
    assert not chunk.unchecked
    checked: list[range] = []
    for computed in range(9, 9 + len(shares)):
        [row] = batch.rows(Output({"a": 1}, scheduled_cached_reqs=Cached(["a"], [None], [computed])))
        checked.append(row.unchecked)
    assert [len(part) for part in checked] == shares
    assert [position for part in checked for position in part] == list(range(8))
    [later] = batch.rows(Output({"a": 1}, scheduled_cached_reqs=Cached(["a"], [None], [9 + len(shares)])))
    assert not later.unchecked


def test_loaded_tokens_that_are_computed_again_are_not_looked_at(batch: Batch) -> None:
    batch.rows(Output({"a": 1}, [New("a", list(range(10)), ([1],), num_computed_tokens=8)]))
    [again] = batch.rows(Output({"a": 10}, scheduled_cached_reqs=Cached(["a"], [None], [0])))
    assert (len(again.unchecked), again.samples) == (0, True)


def test_resumed_request_has_new_blocks_and_all_its_tokens(batch: Batch) -> None:
    batch.rows(Output({"a": 3}, [New("a", [5, 6, 7], ([1],))]))
    cached = Cached(["a"], [([9],)], [0], {"a"}, {"a": [5, 6, 7, 88]})
    [row] = batch.rows(Output({"a": 4}, scheduled_cached_reqs=cached))
    assert row.blocks.tolist() == [9]
    assert row.tokens.between(0, 9).tolist() == [5, 6, 7, 88]
    assert row.samples


def test_finished_request_is_forgotten_and_its_id_may_come_again(batch: Batch) -> None:
    batch.rows(Output({"a": 3}, [New("a", [5, 6, 7], ([1],))]))
    [row] = batch.rows(Output({"a": 2}, [New("a", [8, 9], ([2],))], finished_req_ids={"a"}))
    assert row.tokens.between(0, 9).tolist() == [8, 9]


def test_cost_counts_prefill_tokens_and_the_context_of_decodes(batch: Batch) -> None:
    batch.rows(Output({"a": 3}, [New("a", [5, 6, 7], ([1],))]))
    rows = batch.rows(Output({"a": 1, "b": 8}, [New("b", [1] * 8, ([2],))], Cached(["a"], [None], [3])))
    assert cost_tokens(rows) == (8, 4)
