"""The connector in the scheduler's process: vLLM's calls about requests become commands; it decides no protocol.

Owned by vLLM's engine thread. One record per request that takes part in a transfer, deleted with its end; what
vLLM is told of a request that has no record is dropped (`filter_output`), because vLLM's scheduler asserts that
it knows each id.

R12 (quiet destination) rests on vLLM, since a registration is quicker than a step: blocks that a step in flight may
still write to (its requests may have been aborted, finished or preempted) are kept out of the free
pool while steps overlap and the engine may receive (`defer_block_free`, for `kv_consumer` and `kv_both` alike), and
without overlap no step is in flight when blocks are allocated. So an engine that is `kv_producer` only must
never receive, and requests that ask it to are computed there. R13 (final source): see sending_side.py.

A prompt that is to be sent may itself begin with an earlier turn of its conversation, which another engine keeps
(keeping_side.py). It is asked how much of it is the same, and that is received before the rest is computed. If it then
does not come, the request begins anew without it, whatever vLLM's policy is for prompts that do not come.
"""

import logging
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from kvpush.core.commands import Abort, Disown, Expect, Inquire, Receive, Watch
from kvpush.core.digests import NO_DIGESTS
from kvpush.core.errors import ConfigError, Reason
from kvpush.core.events import Found, PrefillBegun, Purpose
from kvpush.core.ids import RequestId, TransferId
from kvpush.core.layout import Span
from kvpush.core.params import ReceiveParams, Reference, SendParams, parse
from kvpush.runtime.local import SchedulerEnd
from kvpush.vllm.first_token import FirstTokens
from kvpush.vllm.keeping_side import KeepingSide
from kvpush.vllm.kept import KeptBlocks
from kvpush.vllm.keys import sub_key
from kvpush.vllm.lull import Lull
from kvpush.vllm.metadata import RankReport, StepCommands
from kvpush.vllm.orders import Orders
from kvpush.vllm.receiving import Receiving, Stage, computes_itself, least_tokens
from kvpush.vllm.reserve import Reserve
from kvpush.vllm.sending_side import Handover, SendingSide
from kvpush.vllm.settings import Keeping, Push
from kvpush.vllm.tokens import prompt_digests

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)

_NOTHING = RankReport()


class SchedulerSide:
    """vLLM's scheduler-side hooks for requests, and the commands that come of them."""

    def __init__(
        self,
        transfer: "KVTransferConfig",
        block_sizes: tuple[int, ...],
        push: Push,
        reserve: Reserve,
        first_tokens: FirstTokens,
        keeping: Keeping,
        ranks: int,
        lull: Lull,
        refused: Callable[[Reason], None],
        recomputed: Callable[[TransferId], None],
        free: Callable[[Request], None],
    ) -> None:
        """`block_sizes`: tokens per block of each cache group. `ranks`: workers that report. `lull`: how long a step
        without work may wait. `refused` counts requests with bad parameters, `recomputed` is told of prompts that vLLM
        computes though they were to come; `free` gives all blocks of a waiting request back to vLLM's pool."""
        self._may_send = bool(transfer.is_kv_producer)
        self._may_receive = bool(transfer.is_kv_consumer)
        self._role = str(transfer.kv_role)
        self._recomputes_lost = transfer.kv_load_failure_policy == "recompute"
        self._block_sizes = block_sizes
        self._reserve = reserve
        self._first_tokens = first_tokens
        self._receiving: dict[str, Receiving] = {}
        self._newcomers: list[str] = []
        self._orders = Orders()
        self._say = self._orders.say
        self._early: set[str] = set()
        self._sending = SendingSide(push, block_sizes, self._say, self._orders.say_with_step)
        self._keeping = KeepingSide(keeping, block_sizes, self._say)
        self._ranks = ranks
        self._lull = lull
        self._refused = refused
        self._recomputed = recomputed
        self._free = free
        self.quarantine = KeptBlocks()

    def bind(self, pool: "BlockPool") -> None:
        """vLLM's block pool exists."""
        self.quarantine.bind(pool)
        self._sending.pins.bind(pool)
        self._reserve.bind(pool)
        self._keeping.bind(pool)

    def connect(self, line: SchedulerEnd) -> None:
        """Speak to the workers' transfer threads directly, and hear them, from now on."""
        self._orders.connect(line)

    def close(self) -> None:
        """Say and hear nothing more. Idempotent."""
        self._orders.line.close()

    # requests -------------------------------------------------------------------------------------------
    def request_added(self, request: Request) -> None:
        """A request has arrived; one with parameters we cannot use goes on as if it had none."""
        self._lull.request_added(request.request_id)
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
        if isinstance(params, ReceiveParams) and not self._may_receive:
            self._recomputed(key.transfer_id)
        self._check_role(params)
        if isinstance(params, SendParams):
            self._sending.announce(request, key, params.key)
            self._look_for_earlier_turn(request, params.reuse)
        elif request.abort_immediately:
            # vLLM's stand-in for a request that its API has turned away, or that has failed: it has the same key
            self._say(Disown(key, name, params.target))
        else:
            self._receiving[request_id] = Receiving(request, key, params.target, Purpose.PROMPT, params.mode)
            self._say(Expect(key, name, params.target))
            self._newcomers.append(request_id)
            if params.keep is not None and self._may_send:
                self._keeping.want(request_id, sub_key(params.keep, request_id))

    def _look_for_earlier_turn(self, request: Request, reference: Reference | None) -> None:
        digests = prompt_digests(request) if reference is not None and self._may_receive else NO_DIGESTS
        if reference is None or digests == NO_DIGESTS:
            return
        key, name = sub_key(reference.key, request.request_id), RequestId(request.request_id)
        if any(record.key == key for record in self._receiving.values()):
            self._refused(Reason.DUPLICATE_KEY)  # the first to ask gets it; ending this one must not end that
            return
        self._receiving[name] = Receiving(request, key, reference.target, Purpose.CONVERSATION)
        self._say(Expect(key, name, reference.target))
        self._say(Inquire(key, name, reference.target, digests))

    def _check_role(self, params: SendParams | ReceiveParams) -> None:
        is_send = isinstance(params, SendParams)
        if not (self._may_send if is_send else self._may_receive):
            field, role = ("do_remote_decode", "kv_producer") if is_send else ("do_remote_prefill", "kv_consumer")
            raise ConfigError(field, f"this engine is {self._role}", f"Send it to a {role} or kv_both.")

    def remote_tokens(self, request: Request, computed: int) -> int | None:
        """How many tokens after the first `computed` are to come from the sender; None while it is too early for
        blocks, or not known how many there are. Changes nothing that counts: vLLM may ask again and again before it has
        blocks."""
        tokens = self._remote_tokens(request, computed)
        if tokens is not None:
            self._keeping.hungers(request, computed)
        return tokens

    def _remote_tokens(self, request: Request, computed: int) -> int | None:
        record = self._receiving.get(request.request_id)
        if record is None or record.stage not in (Stage.ASKING, Stage.KNOWN) or computes_itself(request):
            return 0
        if record.stage is Stage.ASKING:
            self._hear()
        if record.stage is Stage.ASKING:
            return None
        record.computed = computed
        missing = record.end - computed
        if missing < least_tokens(record, min(self._block_sizes), self._first_tokens):
            return 0
        if record.begun or self._reserve.allows(missing):
            return missing
        self._hear()
        return missing if record.begun else None

    def blocks_allocated(self, request: Request, blocks: "KVCacheBlocks", remote_tokens: int) -> None:
        """vLLM has allocated blocks, `remote_tokens` of them for us to fill."""
        self._keeping.fed(request.request_id)
        record = self._receiving.get(request.request_id)
        if record is None or record.stage not in (Stage.ASKING, Stage.KNOWN):
            return
        if not remote_tokens:
            self._need_nothing(record)
            return
        span = Span(record.computed, record.computed + remote_tokens)
        ids = tuple(
            tuple(group[span.start // size : -(-span.end // size)])
            for group, size in zip(blocks.get_block_ids(), self._block_sizes, strict=True)
        )
        record.stage, record.blocks = Stage.MOVING, ids
        record.end = span.end
        record.wants_token = record.purpose is Purpose.PROMPT and self._first_tokens.wanted(request)
        name = RequestId(request.request_id)
        wants_token, purpose, mode = record.wants_token, record.purpose, record.mode
        self._say(Receive(record.key, name, record.target, span, ids, wants_token, purpose, mode))

    def _need_nothing(self, record: Receiving) -> None:
        record.stage = Stage.OVER
        self._say(Abort(record.key, Reason.NOT_NEEDED))
        if record.purpose is Purpose.PROMPT:
            self._first_tokens.unused(Reason.NOT_NEEDED)
            if computes_itself(record.request):
                self._recomputed(record.key.transfer_id)

    def step(self, output: "SchedulerOutput") -> StepCommands:
        """A step has been scheduled: the commands since the last one, and what it makes final of prompts that are to be
        sent."""
        tokens = output.total_num_scheduled_tokens
        self._watch_newcomers()
        self._keeping.step(tokens)
        finals = self._sending.step(output)
        self._lull.step_scheduled(tokens)
        if not (self._orders or tokens):
            self._wait()
        return self._orders.take(finals)

    def _wait(self) -> None:
        """For news, in a step without work; without them vLLM would come back to ask at once."""
        waiting = sum(record.waits for record in self._receiving.values())
        ours = self.open_requests + len(self.quarantine)
        wait_ms = self._lull.wait_ms(waiting) if ours and self._orders.line.is_whole else 0
        if wait_ms and self._orders.line.wait(wait_ms):
            self._lull.heard()
            self._hear()

    def step_ended(self) -> None:
        """vLLM has taken in the results of a step."""
        self._lull.step_ended()

    def _watch_newcomers(self) -> None:
        """Ask for a word about requests that have come and have got no blocks: they may have to wait for it."""
        newcomers, self._newcomers = self._newcomers, []
        for name in newcomers if self._reserve.keeps_back else ():
            record = self._receiving.get(name)
            if record is not None and record.stage is Stage.KNOWN:
                self._say(Watch(record.key, RequestId(name)))

    def request_finished(self, request: Request, blocks: tuple[list[int], ...]) -> Handover | None:
        """vLLM is done with a request. None lets vLLM free its blocks (unless they are still being received)."""
        self._lull.request_finished(request.request_id)
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
        if record.stage is not Stage.OVER:
            self._say(Abort(record.key, Reason.ABORTED))
        if record.stage is Stage.MOVING:
            record.released = True
        else:
            del self._receiving[request_id]
        return record.reused

    # the worker -----------------------------------------------------------------------------------------
    @property
    def needs_step(self) -> bool:
        """Whether a step is needed though no request wants one: to carry commands to the workers, or to hear from
        them that quarantined blocks are safe."""
        return bool(self._orders) or len(self.quarantine) > 0 or self._sending.needs_step

    def filter_output(self, output: "KVConnectorOutput") -> None:
        """Leave in the worker's report only the requests that vLLM still waits for; what must not be reused yet
        is kept before vLLM acts on the rest."""
        report = output.kv_connector_worker_meta
        report = report if isinstance(report, RankReport) else _NOTHING
        self._update_quarantine(report)
        self._note_begun(report)
        self._note_earlier_turns(report)
        self._hear()
        received, self._early = self._early | (output.finished_recving or set()), set()
        output.finished_recving = {name for name in received if self._received(name, output.failed_recving)}
        self._note_tokens(report, output.finished_recving)
        output.finished_sending = {name for name in output.finished_sending or () if self._sent(name)}

    def _sent(self, request_id: str) -> bool:
        return not self._keeping.freed(request_id) and self._sending.sent(request_id)

    def _update_quarantine(self, report: RankReport) -> None:
        for name in report.kept:
            record = self._receiving.get(name)
            if record is not None:
                self.quarantine.keep(name, chain.from_iterable(record.blocks))
        for name in report.released:
            self.quarantine.release(name)

    def _hear(self) -> None:
        """What the transfer threads have said since they were last heard: the same comes with a step, later. With what
        has come in the meantime, a request goes on one or two steps earlier."""
        for event in self._orders.line.take():
            record = self._receiving.get(event.request_id)
            if record is None:
                continue
            if isinstance(event, PrefillBegun):
                record.begun = True
                continue
            if isinstance(event, Found):
                record.early_answers += 1
                self._note_found(record, event.tokens, record.early_answers)
                continue
            record.token = event.token
            record.ranks_heard += 1
            if record.ranks_heard == self._orders.line.ranks:
                self._early.add(event.request_id)

    def _note_begun(self, report: RankReport) -> None:
        for name in report.begun:
            record = self._receiving.get(name)
            if record is not None:
                record.begun = True

    def _note_earlier_turns(self, report: RankReport) -> None:
        for name, tokens in report.found:
            if (record := self._receiving.get(name)) is not None:
                record.answers += 1
                self._note_found(record, tokens, record.answers)
        for name in report.lost:
            if (record := self._receiving.get(name)) is not None:
                record.lost = True

    def _note_found(self, record: Receiving, tokens: int, answers: int) -> None:
        """`answers` of the ranks have come in one way; what all of them have can be received."""
        if record.stage is Stage.ASKING:
            record.end = min(record.end, tokens)
            record.stage = Stage.KNOWN if answers == self._ranks else Stage.ASKING

    def _note_tokens(self, report: RankReport, received: set[str]) -> None:
        """With several ranks a request's token comes with the last of them at the latest, from each the same."""
        for name, token in report.tokens:
            if (record := self._receiving.get(name)) is not None:
                record.token = token
        for name in received:
            record = self._receiving.get(name)
            if record is None or not record.wants_token:
                continue
            if record.token is None:
                self._first_tokens.unused(Reason.NO_TOKEN)
            else:
                self._first_tokens.arrived(name, record.token)

    def _received(self, request_id: str, failed: set[str]) -> bool:
        record = self._receiving.get(request_id)
        if record is None or record.stage is not Stage.MOVING:
            return False
        record.stage = Stage.OVER
        if record.released:
            del self._receiving[request_id]
            return True
        if request_id in failed and self._recomputes_lost:
            self._recomputed(record.key.transfer_id)
        if record.lost:
            self._begin_anew(record.request)
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
