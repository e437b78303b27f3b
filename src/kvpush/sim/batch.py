"""What the worker remembers of its requests between steps, and how a scheduler's step becomes rows for the device."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpush.sim.device import Row, TokenStore
from kvpush.sim.kvfunc import Words

_MOST_CHECKS = 8


@dataclass
class Sequence:
    """One request. `length` counts the prompt and every token sampled so far or in flight.

    `unchecked`: KV at these positions came from elsewhere, and no step has been told to check it yet; it is
    checked over the next `checks` steps that sample.
    """

    tokens: TokenStore
    blocks: Words
    length: int
    unchecked: range
    checks: int

    def add_blocks(self, blocks: Iterable[int]) -> None:
        """Append to the block table; rows that were launched keep the old array."""
        self.blocks = np.concatenate([self.blocks, np.array(list(blocks), dtype=np.int64)])

    def next_check(self, start: int) -> range:
        """What the next step that samples, and computes from `start` on, is to check."""
        left = range(self.unchecked.start, min(self.unchecked.stop, start))
        share = left[: -(-len(left) // max(1, self.checks))]
        self.unchecked = left[len(share) :]
        self.checks -= 1
        return share


@dataclass
class Batch:
    """All requests of one worker. Used by the engine's worker thread only."""

    _sequences: dict[str, Sequence] = field(default_factory=dict)

    def rows(self, output: Any) -> list[Row]:
        """Apply vLLM's `SchedulerOutput` and return what the device has to do."""
        for request_id in output.finished_req_ids:
            self._sequences.pop(request_id, None)
        starts = self._admit(output.scheduled_new_reqs) | self._update(output.scheduled_cached_reqs)
        return [self._row(request_id, starts[request_id], n) for request_id, n in output.num_scheduled_tokens.items()]

    def _admit(self, new: Iterable[Any]) -> dict[str, int]:
        starts = {}
        for request in new:
            tokens = np.array(request.prompt_token_ids, dtype=np.int64)
            blocks = np.array(request.block_ids[0], dtype=np.int64)
            start = request.num_computed_tokens
            self._sequences[request.req_id] = Sequence(
                TokenStore(tokens), blocks, len(tokens), range(start), _checks(request.sampling_params)
            )
            starts[request.req_id] = start
        return starts

    def _update(self, cached: Any) -> dict[str, int]:
        starts = {}
        for request_id, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._resume(request_id, blocks[0], start, cached.all_token_ids.get(request_id))
            elif blocks is not None:
                self._sequences[request_id].add_blocks(blocks[0])
            starts[request_id] = start
        return starts

    def _resume(self, request_id: str, blocks: list[int], start: int, tokens: list[int] | None) -> None:
        sequence = self._sequences[request_id]
        if tokens is not None:
            sequence.tokens = TokenStore(np.array(tokens, dtype=np.int64))
            sequence.length = len(tokens)
        sequence.blocks = np.array(blocks, dtype=np.int64)
        sequence.unchecked, sequence.checks = range(start), 1

    def _row(self, request_id: str, start: int, scheduled: int) -> Row:
        sequence = self._sequences[request_id]
        end = start + scheduled
        samples = end >= sequence.length
        unchecked = sequence.next_check(start) if samples else range(0)
        if samples:
            sequence.length += 1
        return Row(request_id, sequence.tokens, sequence.blocks, start, end, samples, unchecked)


def _checks(params: Any) -> int:
    """Over how many steps to check what was loaded: it must not make a step longer than it is modelled to be."""
    return min(_MOST_CHECKS, getattr(params, "max_tokens", None) or 1)


def cost_tokens(rows: Iterable[Row]) -> tuple[int, int]:
    """(prefill tokens, KV tokens read by decoding rows) of a step."""
    prefill = context = 0
    for row in rows:
        if row.end - row.start > 1:
            prefill += row.end - row.start
        else:
            context += row.end
    return prefill, context
