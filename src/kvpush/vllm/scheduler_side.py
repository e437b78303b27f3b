"""The connector in the scheduler's process: vLLM's calls about requests become commands; it decides no protocol.

Owned by vLLM's engine thread. One record per request that takes part in a transfer, deleted with its end; what
vLLM is told of a request that has no record is dropped (`filter_output`), because vLLM's scheduler asserts that
it knows each id.

R12 (quiet destination) rests on vLLM: blocks that a step in flight may still write to are kept out of the free
pool while steps overlap and the engine may receive (`defer_block_free`, for `kv_consumer` and `kv_both` alike), and
without overlap no step is in flight when blocks are allocated. So an engine that is `kv_producer` only must
never receive, and requests that ask it to are computed there. R13 (final source): see sending_side.py.

A prompt that is to be sent may itself begin with an earlier turn of its conversation, which another engine keeps
(keeping_side.py). It is asked how much of it is the same, and that is received before the rest is computed. If it then
does not come, the request begins anew without it, whatever vLLM's policy is for prompts that do not come.
"""

import logging
from collections.abc import Callable
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from kvpush.core.commands import Abort, Command, Expect, Inquire, Receive
from kvpush.core.digests import NO_DIGESTS
from kvpush.core.errors import ConfigError, Reason
from kvpush.core.events import Purpose
from kvpush.core.ids import Key, RequestId, Target
from kvpush.core.layout import Blocks, Span
from kvpush.core.params import ReceiveParams, Reference, SendParams, parse
from kvpush.vllm.keeping_side import KeepingSide
from kvpush.vllm.kept import KeptBlocks
from kvpush.vllm.keys import sub_key
from kvpush.vllm.metadata import RankReport
from kvpush.vllm.sending_side import Handover, SendingSide
from kvpush.vllm.settings import Keeping, Push
from kvpush.vllm.step_push import StepFinals
from kvpush.vllm.tokens import prompt_digests

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)


class _Stage(Enum):
    """How far a request has come."""

    ASKING = auto()  # how much of an earlier turn can be had
    KNOWN = auto()  # announced or expected
    MOVING = auto()  # blocks are handed over until the worker reports the request
    OVER = auto()  # nothing to transfer any more, the request goes on


class _Receiving:
    """A request whose prompt another engine has: all of it, or `found` tokens of an earlier turn."""

    __slots__ = (
        "answers",
        "blocks",
        "computed",
        "found",
        "key",
        "lost",
        "purpose",
        "released",
        "request",
        "reused",
        "stage",
        "target",
    )

    def __init__(self, request: Request, key: Key, target: Target, purpose: Purpose) -> None:
        self.request = request
        self.key = key
        self.target = target
        self.purpose = purpose
        self.stage = _Stage.KNOWN if purpose is Purpose.PROMPT else _Stage.ASKING
        self.found = int(request.num_prompt_tokens)
        self.answers = 0  # of ranks that have said how much they have found
        self.reused = 0  # tokens of an earlier turn that have come
        self.lost = False  # an earlier turn was found, but has not come
        self.computed = 0  # tokens that the engine had of its own when it was last asked
        self.blocks: Blocks = ()  # that are being received into
        self.released = False  # vLLM has finished the request and waits for its blocks only


class SchedulerSide:
    """vLLM's scheduler-side hooks for requests, and the commands that come of them."""

    def __init__(
        self,
        transfer: "KVTransferConfig",
        block_sizes: tuple[int, ...],
        push: Push,
        keeping: Keeping,
        ranks: int,
        refused: Callable[[Reason], None],
        free: Callable[[Request], None],
    ) -> None:
        """`block_sizes`: tokens per block of each cache group. `ranks`: workers that report. `refused` counts requests
        with bad parameters; `free` gives all blocks of a waiting request back to vLLM's pool."""
        self._may_send = bool(transfer.is_kv_producer)
        self._may_receive = bool(transfer.is_kv_consumer)
        self._role = str(transfer.kv_role)
        self._block_sizes = block_sizes
        self._receiving: dict[str, _Receiving] = {}
        self._commands: list[Command] = []
        self._sending = SendingSide(push, block_sizes, self._say)
        self._keeping = KeepingSide(keeping, block_sizes, self._say)
        self._ranks = ranks
        self._refused = refused
        self._free = free
        self.quarantine = KeptBlocks()

    def bind(self, pool: "BlockPool") -> None:
        """vLLM's block pool exists."""
        self.quarantine.bind(pool)
        self._sending.pins.bind(pool)
        self._keeping.bind(pool)

    def _say(self, command: Command) -> None:
        self._commands.append(command)

    # requests -------------------------------------------------------------------------------------------
    def request_added(self, request: Request) -> None:
        """A request has arrived; one with parameters we cannot use goes on as if it had none."""
        try:
            self._admit(request)
        except ConfigError as error:
            self._refused(Reason.BAD_MESSAGE)
            logger.warning("request %s takes part in no transfer: %s", request.request_id, error)

    def _admit(self, request: Request) -> None:
        params, request_id = parse(request.kv_transfer_params), request.request_id
        if params is None:
            return
        key, name = sub_key(params.key, request_id), RequestId(request_id)
        self._check_role(params)
        if isinstance(params, SendParams):
            self._sending.announce(request, key, params.key)
            self._look_for_earlier_turn(request, params.reuse)
            return
        self._receiving[request_id] = _Receiving(request, key, params.target, Purpose.PROMPT)
        self._say(Expect(key, name, params.target))
        if params.keep is not None and self._may_send:
            self._keeping.want(request_id, sub_key(params.keep, request_id))

    def _look_for_earlier_turn(self, request: Request, reference: Reference | None) -> None:
        digests = prompt_digests(request) if reference is not None and self._may_receive else NO_DIGESTS
        if reference is None or digests == NO_DIGESTS:
            return
        key, name = sub_key(reference.key, request.request_id), RequestId(request.request_id)
        self._receiving[name] = _Receiving(request, key, reference.target, Purpose.CONVERSATION)
        self._say(Expect(key, name, reference.target))
        self._say(Inquire(key, name, reference.target, digests))

    def _check_role(self, params: SendParams | ReceiveParams) -> None:
        if isinstance(params, SendParams) and not self._may_send:
            raise ConfigError(
                "do_remote_decode", f"this engine is {self._role}", "Send it to a kv_producer or kv_both."
            )
        if isinstance(params, ReceiveParams) and not self._may_receive:
            raise ConfigError(
                "do_remote_prefill", f"this engine is {self._role}", "Send it to a kv_consumer or kv_both."
            )

    def remote_tokens(self, request: Request, computed: int) -> int | None:
        """How many tokens after the first `computed` are to come from the sender; None when that is to be seen. Changes
        nothing that counts: vLLM may ask again and again before it has blocks."""
        record = self._receiving.get(request.request_id)
        if record is not None and record.stage is _Stage.ASKING and not _computes_itself(request):
            return None
        self._keeping.hungers(request, computed)
        if record is None or record.stage is not _Stage.KNOWN or _computes_itself(request):
            return 0
        record.computed = computed
        missing = record.found - computed
        return missing if missing >= self._least_tokens(record) else 0

    def _least_tokens(self, record: _Receiving) -> int:
        """What is not worth to be sent. Of a whole prompt vLLM computes the last token in any case, to sample from it;
        of an earlier turn less than a block."""
        return 2 if record.purpose is Purpose.PROMPT else min(self._block_sizes)

    def blocks_allocated(self, request: Request, blocks: "KVCacheBlocks", remote_tokens: int) -> None:
        """vLLM has allocated blocks, `remote_tokens` of them for us to fill."""
        self._keeping.fed(request.request_id)
        record = self._receiving.get(request.request_id)
        if record is None or record.stage not in (_Stage.KNOWN, _Stage.ASKING):
            return
        if not remote_tokens:
            record.stage = _Stage.OVER
            self._say(Abort(record.key, Reason.NOT_NEEDED))
            return
        span = Span(record.computed, record.computed + remote_tokens)
        record.found = span.end
        ids = tuple(
            tuple(group[span.start // size : -(-span.end // size)])
            for group, size in zip(blocks.get_block_ids(), self._block_sizes, strict=True)
        )
        record.stage, record.blocks = _Stage.MOVING, ids
        name = RequestId(request.request_id)
        self._say(Receive(record.key, name, record.target, span, ids, record.purpose))

    def step(self, output: "SchedulerOutput") -> StepFinals:
        """A step has been scheduled: what it makes final of prompts that are to be sent."""
        self._keeping.step(output.total_num_scheduled_tokens)
        return self._sending.step(output)

    def request_finished(self, request: Request, blocks: tuple[list[int], ...]) -> Handover | None:
        """vLLM is done with a request. None lets vLLM free its blocks (unless they are still being received)."""
        reused = self._end_receiving(request.request_id)
        self._keeping.fed(request.request_id)
        self._keeping.finished(request, blocks)
        handover = self._sending.finished(request, blocks)
        return handover and handover._replace(reused=reused)

    def _end_receiving(self, request_id: str) -> int:
        """Returns how many tokens of an earlier turn have come."""
        record = self._receiving.get(request_id)
        if record is None:
            return 0
        if record.stage is not _Stage.OVER:
            self._say(Abort(record.key, Reason.ABORTED))
        if record.stage is _Stage.MOVING:
            record.released = True
        else:
            del self._receiving[request_id]
        return record.reused

    # the worker -----------------------------------------------------------------------------------------
    def take_commands(self) -> tuple[Command, ...]:
        """The commands since the last call, in order."""
        commands, self._commands = tuple(self._commands), []
        return commands

    @property
    def needs_step(self) -> bool:
        """Whether a step is needed though no request wants one: to carry commands to the workers, or to hear from
        them that quarantined blocks are safe."""
        return bool(self._commands) or len(self.quarantine) > 0 or self._sending.needs_step

    def filter_output(self, output: "KVConnectorOutput") -> None:
        """Leave in the worker's report only the requests that vLLM still waits for; what must not be reused yet
        is kept before vLLM acts on the rest."""
        report = output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._update_quarantine(report)
            self._note_earlier_turns(report)
        received = output.finished_recving or ()
        output.finished_recving = {name for name in received if self._received(name)}
        output.finished_sending = {name for name in output.finished_sending or () if self._sent(name)}

    def _sent(self, request_id: str) -> bool:
        return not self._keeping.freed(request_id) and self._sending.sent(request_id)

    def _note_earlier_turns(self, report: RankReport) -> None:
        for name, tokens in report.found:
            record = self._receiving.get(name)
            if record is None or record.stage is not _Stage.ASKING:
                continue
            record.found = min(record.found, tokens)
            record.answers += 1
            if record.answers == self._ranks:
                record.stage = _Stage.KNOWN
        for name in report.lost:
            if (record := self._receiving.get(name)) is not None:
                record.lost = True

    def _update_quarantine(self, report: RankReport) -> None:
        for name in report.kept:
            record = self._receiving.get(name)
            if record is not None:
                self.quarantine.keep(name, chain.from_iterable(record.blocks))
        for name in report.released:
            self.quarantine.release(name)

    def _received(self, request_id: str) -> bool:
        record = self._receiving.get(request_id)
        if record is None or record.stage is not _Stage.MOVING:
            return False
        record.stage = _Stage.OVER
        if record.released:
            del self._receiving[request_id]
            return True
        if record.lost:
            self._begin_anew(record.request)
        elif record.purpose is Purpose.CONVERSATION:
            record.reused = record.found - record.computed
        self._keeping.loaded(record.request)
        return True

    def _begin_anew(self, request: Request) -> None:
        """As vLLM itself does under the policy 'recompute': without its blocks, which may be in quarantine."""
        self._free(request)
        request.num_computed_tokens = 0

    @property
    def open_requests(self) -> int:
        """Requests with a record: 0 when nothing is going on."""
        return len(self._receiving) + len(self._sending)

    @property
    def kept_requests(self) -> int:
        """Finished requests whose blocks are kept for another turn."""
        return len(self._keeping)

    def forget_kept(self) -> bool:
        """Let go of what is kept for other turns. Returns whether nothing is."""
        self._keeping.release_all()
        return not self._keeping

    def relieve_running(self) -> bool:
        """vLLM lacks a block for a running request. Whether one is about to be free."""
        return self._keeping.relieve_running()


def _computes_itself(request: Request) -> bool:
    """Requests whose prompt this engine has to compute, whoever else has: it needs logits for all of it, it has
    been there before, or the prompt is not complete yet."""
    return bool(request.skip_reading_prefix_cache or request.num_preemptions or request.resumable)
