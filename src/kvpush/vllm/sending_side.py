"""The connector in the scheduler's process, for prompts that are to be sent. Owned by vLLM's engine thread.

When a prompt is handed to the transfer threads depends on the `Push` setting. WHOLE: when its request has finished.
Otherwise step by step: each step's metadata names what it makes final, and the workers pass it on once the device has
come so far (R13). Chunks before the last one are not pinned: a request that is preempted frees its blocks, and what was
written of them is retracted and written again. With its last chunk a prompt is complete, and pinned by a reference
of ours, for vLLM may still preempt or abort the request; when the request finishes, vLLM keeps the blocks itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.request import Request, RequestStatus

from kvpush.core.commands import Announce, Begin, Command, Final, Retract, Sampled, Withdraw
from kvpush.core.errors import Reason
from kvpush.core.ids import Key, RequestId
from kvpush.core.layout import Blocks
from kvpush.vllm.kept import KeptBlocks
from kvpush.vllm.settings import Push
from kvpush.vllm.step_push import NO_FINALS, StepFinals

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_GOOD_ENDS = (
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_REPETITION,
)


class _Stage(Enum):
    """How far a prompt has come."""

    KNOWN = auto()  # announced; chunks of it may have been handed over
    COMPLETE = auto()  # handed over and pinned by us; the request goes on
    KEPT = auto()  # the request has finished, and vLLM keeps its blocks until they are reported as sent
    LEFT = auto()  # the request has finished, and we alone keep the blocks
    SENT = auto()  # reported as sent; the request goes on


@dataclass
class _Sending:
    """A prompt that is computed for another engine. `begun`: the engine that waits for it has been told, or will be
    when it is complete. `blocks` are those that vLLM's steps have named; `handed` is how
    many tokens have been handed over, `pinned` the blocks of a complete prompt. `stepwise` only if its length is
    known from the start. `on_steps`: what is said of it goes with the steps, so as not to overtake what went before."""

    key: Key
    api_key: Key
    prompt_tokens: int
    stepwise: bool
    begun: bool
    on_steps: bool
    stage: _Stage = _Stage.KNOWN
    blocks: list[list[int]] = field(default_factory=list)
    handed: int = 0
    pinned: Blocks = ()


class Handover(NamedTuple):
    """What a finished prefill leaves: the API request's key, and whether vLLM is to keep its blocks for now; `reused`
    tokens of it were not computed, because an earlier turn had left them elsewhere."""

    key: Key
    keep: bool
    reused: int = 0


class SendingSide:
    """All prompts of one engine that are to be sent."""

    def __init__(
        self,
        push: Push,
        block_sizes: tuple[int, ...],
        say: Callable[[Command], None],
        say_with_step: Callable[[Command], None],
    ) -> None:
        """`say` passes a command on at once, `say_with_step` behind the steps so far."""
        self._push = push
        self._block_sizes = block_sizes
        self._say_at_once = say
        self._say_with_step = say_with_step
        self._prompts: dict[str, _Sending] = {}
        self._left = 0
        self.pins = KeptBlocks()

    def announce(self, request: Request, key: Key, api_key: Key) -> None:
        """A request has arrived whose prompt is to be sent. vLLM makes a stand-in of one that its API has turned away,
        or that has failed: of the latter all has been said."""
        if request.abort_immediately and any(record.key == key for record in self._prompts.values()):
            return
        stepwise = self._push is not Push.WHOLE and not request.resumable
        tokens, stands_in = int(request.num_prompt_tokens), bool(request.abort_immediately)
        record = _Sending(key, api_key, tokens, stepwise, request.resumable, on_steps=stands_in)
        self._prompts[request.request_id] = record
        self._say(record, Announce(key, RequestId(request.request_id)))

    def _say(self, record: _Sending, command: Command) -> None:
        (self._say_with_step if record.on_steps else self._say_at_once)(command)

    # steps ----------------------------------------------------------------------------------------------
    def step(self, output: "SchedulerOutput") -> StepFinals:
        """A step has been scheduled: what it makes final."""
        if not self._prompts:
            return NO_FINALS
        for name in output.preempted_req_ids or ():
            self._preempted(name)
        self._note_blocks(output)
        finals, tokens = [], 0
        for name, record, computed in self._scheduled(output):
            self._note_begun(name, record, computed)
            if not record.stepwise:
                continue
            complete = min(computed, record.prompt_tokens)
            tokens += complete - record.handed
            record.handed, record.on_steps = complete, True
            finals.append(self._final(name, record))
        return StepFinals(tuple(finals), tokens)

    def _note_begun(self, name: str, record: _Sending, computed: int) -> None:
        """A prompt whose last chunk is scheduled has all of its blocks."""
        if computed >= record.prompt_tokens and not record.begun:
            record.begun = True
            self._say(record, Begin(record.key, RequestId(name)))

    def _preempted(self, name: str) -> None:
        """A prompt that is complete stays where it is, and is not sent again when vLLM computes it again."""
        record = self._prompts.get(name)
        if record is None or record.stage is not _Stage.KNOWN:
            return
        if record.handed:
            self._say(record, Retract(record.key, RequestId(name)))
        record.handed, record.blocks = 0, []

    def _note_blocks(self, output: "SchedulerOutput") -> None:
        for new in output.scheduled_new_reqs:
            if (record := self._prompts.get(new.req_id)) is not None:
                record.blocks = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            record = self._prompts.get(name)
            if record is None or ids is None:
                continue
            if name in cached.resumed_req_ids or not record.blocks:
                record.blocks = [list(group) for group in ids]
            else:
                for known, more in zip(record.blocks, ids, strict=True):
                    known.extend(more)

    def _scheduled(self, output: "SchedulerOutput") -> Iterator[tuple[str, _Sending, int]]:
        """The prompts that a step goes on with, and how many of their tokens are computed after it."""
        cached = output.scheduled_cached_reqs
        starts = chain(
            ((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs),
            zip(cached.req_ids, cached.num_computed_tokens, strict=True),
        )
        for name, start in starts:
            record = self._prompts.get(name)
            if record is not None and record.stage is _Stage.KNOWN:
                yield name, record, start + output.num_scheduled_tokens[name]

    def _final(self, name: str, record: _Sending) -> Final:
        blocks = self._first_blocks(record.blocks, record.handed)
        last = record.handed == record.prompt_tokens
        if last:
            record.stage, record.pinned = _Stage.COMPLETE, blocks
            self.pins.keep(name, chain.from_iterable(blocks))
        return Final(record.key, RequestId(name), record.handed, blocks, last)

    def _first_blocks(self, blocks: list[list[int]] | tuple[list[int], ...], tokens: int) -> Blocks:
        pairs = zip(blocks, self._block_sizes, strict=True)
        return tuple(tuple(group[: -(-tokens // size)]) for group, size in pairs)

    # ends -----------------------------------------------------------------------------------------------
    def finished(self, request: Request, blocks: tuple[list[int], ...]) -> Handover | None:
        """vLLM is done with a request; None when it was not to be sent, or cannot be."""
        record = self._prompts.get(request.request_id)
        if record is None:
            return None
        match record.stage:
            case _Stage.KNOWN if problem := _unsendable(request):
                return self._withdraw(request, record, *problem)
            case _Stage.KNOWN:
                self._hand_over(request, record, blocks)
                return Handover(record.api_key, True)
            case _Stage.COMPLETE:
                self._say_token(request, record)
                keep = self._leave(request, record, blocks)
                return Handover(record.api_key, keep)
            case _:
                del self._prompts[request.request_id]
                return Handover(record.api_key, False)

    def _withdraw(self, request: Request, record: _Sending, reason: Reason, detail: str) -> Handover | None:
        """Blocks that a write may be reading are kept until it has stopped."""
        self._say(record, Withdraw(record.key, RequestId(request.request_id), reason, detail))
        if record.handed:
            record.stage = _Stage.KEPT
            return Handover(record.api_key, True)
        del self._prompts[request.request_id]
        return None

    def _hand_over(self, request: Request, record: _Sending, blocks: tuple[list[int], ...]) -> None:
        tokens = int(request.num_prompt_tokens)
        record.stage = _Stage.KEPT
        ids = self._first_blocks(blocks, tokens)
        self._say_token(request, record)
        self._say(record, Final(record.key, RequestId(request.request_id), tokens, ids))

    def _say_token(self, request: Request, record: _Sending) -> None:
        """The engine that gets the prompt may want to begin with the token that was sampled here."""
        sampled = request.status in _GOOD_ENDS and request.num_output_tokens
        token = int(request.output_token_ids[0]) if sampled else None
        self._say(record, Sampled(record.key, RequestId(request.request_id), token))

    def _leave(self, request: Request, record: _Sending, blocks: tuple[list[int], ...]) -> bool:
        """Whether vLLM is to keep the blocks: not if it has computed the prompt again, in others."""
        if self._first_blocks(blocks, record.prompt_tokens) != record.pinned:
            record.stage = _Stage.LEFT
            self._left += 1
            return False
        record.stage = _Stage.KEPT
        self.pins.release(request.request_id)
        return True

    def sent(self, request_id: str) -> bool:
        """All ranks have sent a prompt, or will never. Returns whether vLLM waits to hear that."""
        record = self._prompts.get(request_id)
        if record is None:
            return False
        match record.stage:
            case _Stage.KEPT:
                del self._prompts[request_id]
                return True
            case _Stage.COMPLETE:
                record.stage = _Stage.SENT
                self.pins.release(request_id)
            case _Stage.LEFT:
                del self._prompts[request_id]
                self.pins.release(request_id)
                self._left -= 1
            case _:
                pass
        return False

    @property
    def needs_step(self) -> bool:
        """Whether blocks are kept that vLLM does not know to wait for."""
        return self._left > 0

    def __len__(self) -> int:
        return len(self._prompts)


def _unsendable(request: Request) -> tuple[Reason, str] | None:
    """Why a finished request has no prompt to send."""
    if request.status == RequestStatus.FINISHED_ABORTED:
        return Reason.PREFILL_ABORTED, "the prefill request was aborted"
    if request.status not in _GOOD_ENDS:
        return Reason.PREFILL_FAILED, f"the prefill request ended as {request.status}"
    if request.num_computed_tokens < request.num_prompt_tokens:
        had = f"{request.num_computed_tokens} of {request.num_prompt_tokens}"
        return Reason.PREFILL_FAILED, f"the prefill request ended with {had} prompt tokens computed"
    return None
