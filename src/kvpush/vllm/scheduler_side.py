"""The connector in the scheduler's process: vLLM's calls about requests become commands; it decides no protocol.

Owned by vLLM's engine thread. One record per request that takes part in a transfer, deleted with its end; what
vLLM is told of a request that has no record is dropped (`filter_output`), because vLLM's scheduler asserts that
it knows each id.

R12 (quiet destination) rests on vLLM: blocks that a step in flight may still write to are kept out of the free
pool while steps overlap and the engine may receive (`defer_block_free`, for `kv_consumer` and `kv_both` alike), and
without overlap no step is in flight when blocks are allocated. So an engine that is `kv_producer` only must
never receive, and requests that ask it to are computed there. R13 (final source): see sending_side.py.
"""

import logging
from collections.abc import Callable
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from kvpush.core.commands import Abort, Command, Disown, Expect, Receive, Watch
from kvpush.core.errors import ConfigError, Reason
from kvpush.core.events import PrefillBegun
from kvpush.core.ids import Key, RequestId, Target
from kvpush.core.layout import Blocks, Span
from kvpush.core.mode import Mode
from kvpush.core.params import ReceiveParams, SendParams, parse
from kvpush.runtime.local import Inlet
from kvpush.vllm.first_token import FirstTokens
from kvpush.vllm.kept import KeptBlocks
from kvpush.vllm.keys import sub_key
from kvpush.vllm.metadata import RankReport
from kvpush.vllm.reserve import Reserve
from kvpush.vllm.sending_side import Handover, SendingSide
from kvpush.vllm.settings import Push
from kvpush.vllm.step_push import StepFinals

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)

_NOTHING = RankReport()


class _Stage(Enum):
    """How far a request has come."""

    KNOWN = auto()  # announced or expected
    MOVING = auto()  # blocks are handed over until the worker reports the request
    OVER = auto()  # nothing to transfer any more, the request goes on


class _Receiving:
    """A request whose prompt another engine computes."""

    __slots__ = (
        "begun",
        "blocks",
        "computed",
        "key",
        "mode",
        "ranks_heard",
        "released",
        "stage",
        "target",
        "token",
        "wants_token",
    )

    def __init__(self, key: Key, target: Target, mode: Mode | None) -> None:
        self.key = key
        self.target = target
        self.mode = mode
        self.stage = _Stage.KNOWN
        self.begun = False  # it is time for blocks, wherever they come from
        self.computed = 0  # tokens that the engine had of its own when it was last asked
        self.blocks: Blocks = ()  # that are being received into
        self.token: int | None = None
        self.ranks_heard = 0  # that have said directly that they have received it
        self.wants_token = False  # the first token of its answer is to come with the prompt
        self.released = False  # vLLM has finished the request and waits for its blocks only


class SchedulerSide:
    """vLLM's scheduler-side hooks for requests, and the commands that come of them."""

    def __init__(
        self,
        transfer: "KVTransferConfig",
        block_sizes: tuple[int, ...],
        push: Push,
        reserve: Reserve,
        first_tokens: FirstTokens,
        refused: Callable[[Reason], None],
    ) -> None:
        """`block_sizes`: tokens per block of each cache group. `refused` counts requests with bad parameters."""
        self._may_send = bool(transfer.is_kv_producer)
        self._may_receive = bool(transfer.is_kv_consumer)
        self._role = str(transfer.kv_role)
        self._block_sizes = block_sizes
        self._reserve = reserve
        self._first_tokens = first_tokens
        self._receiving: dict[str, _Receiving] = {}
        self._newcomers: list[str] = []
        self._inlet = Inlet()
        self._early: set[str] = set()
        self._commands: list[Command] = []
        self._sending = SendingSide(push, block_sizes, lambda command: self._commands.append(command))
        self._refused = refused
        self.quarantine = KeptBlocks()

    def bind(self, pool: "BlockPool") -> None:
        """vLLM's block pool exists."""
        self.quarantine.bind(pool)
        self._sending.pins.bind(pool)
        self._reserve.bind(pool)

    def listen(self, inlet: Inlet) -> None:
        """Hear the workers' transfer threads directly, from now on."""
        self.close()
        self._inlet = inlet

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._inlet.close()

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
        elif request.abort_immediately:
            # vLLM's stand-in for a request that its API has turned away, or that has failed: it has the same key
            self._commands.append(Disown(key, name, params.target))
        else:
            self._receiving[request_id] = _Receiving(key, params.target, params.mode)
            self._commands.append(Expect(key, name, params.target))
            self._newcomers.append(request_id)

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
        """How many tokens after the first `computed` are to come from the sender; None while it is too early for
        blocks. Changes nothing that counts: vLLM may ask again and again before it has blocks."""
        record = self._receiving.get(request.request_id)
        if record is None or record.stage is not _Stage.KNOWN or _computes_itself(request):
            return 0
        record.computed = computed
        missing = int(request.num_prompt_tokens) - computed
        if missing <= 1:  # vLLM computes the last token in any case, to sample from it
            return 0
        if record.begun or self._reserve.allows(missing):
            return missing
        self._hear()
        return missing if record.begun else None

    def blocks_allocated(self, request: Request, blocks: "KVCacheBlocks", remote_tokens: int) -> None:
        """vLLM has allocated blocks, `remote_tokens` of them for us to fill."""
        record = self._receiving.get(request.request_id)
        if record is None or record.stage is not _Stage.KNOWN:
            return
        if not remote_tokens:
            record.stage = _Stage.OVER
            self._commands.append(Abort(record.key, Reason.NOT_NEEDED))
            self._first_tokens.unused(Reason.NOT_NEEDED)
            return
        span = Span(record.computed, record.computed + remote_tokens)
        ids = tuple(
            tuple(group[span.start // size : -(-span.end // size)])
            for group, size in zip(blocks.get_block_ids(), self._block_sizes, strict=True)
        )
        record.stage, record.blocks = _Stage.MOVING, ids
        record.wants_token = self._first_tokens.wanted(request)
        name = RequestId(request.request_id)
        self._commands.append(Receive(record.key, name, record.target, span, ids, record.wants_token, record.mode))

    def step(self, output: "SchedulerOutput") -> StepFinals:
        """A step has been scheduled: what it makes final of prompts that are to be sent."""
        self._watch_newcomers()
        return self._sending.step(output)

    def _watch_newcomers(self) -> None:
        """Ask for a word about requests that have come and have got no blocks: they may have to wait for it."""
        newcomers, self._newcomers = self._newcomers, []
        for name in newcomers if self._reserve.keeps_back else ():
            record = self._receiving.get(name)
            if record is not None and record.stage is _Stage.KNOWN:
                self._commands.append(Watch(record.key, RequestId(name)))

    def request_finished(self, request: Request, blocks: tuple[list[int], ...]) -> Handover | None:
        """vLLM is done with a request. None lets vLLM free its blocks (unless they are still being received)."""
        self._end_receiving(request.request_id)
        return self._sending.finished(request, blocks)

    def _end_receiving(self, request_id: str) -> None:
        record = self._receiving.get(request_id)
        if record is None:
            return
        if record.stage is not _Stage.OVER:
            self._commands.append(Abort(record.key, Reason.ABORTED))
        if record.stage is _Stage.MOVING:
            record.released = True
        else:
            del self._receiving[request_id]

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
        report = report if isinstance(report, RankReport) else _NOTHING
        self._update_quarantine(report)
        self._note_begun(report)
        self._hear()
        received, self._early = self._early | (output.finished_recving or set()), set()
        output.finished_recving = {name for name in received if self._received(name)}
        self._note_tokens(report, output.finished_recving)
        output.finished_sending = {name for name in output.finished_sending or () if self._sending.sent(name)}

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
        for event in self._inlet.take():
            record = self._receiving.get(event.request_id)
            if record is None:
                continue
            if isinstance(event, PrefillBegun):
                record.begun = True
                continue
            record.token = event.token
            record.ranks_heard += 1
            if record.ranks_heard == self._inlet.ranks:
                self._early.add(event.request_id)

    def _note_begun(self, report: RankReport) -> None:
        for name in report.begun:
            record = self._receiving.get(name)
            if record is not None:
                record.begun = True

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

    def _received(self, request_id: str) -> bool:
        record = self._receiving.get(request_id)
        if record is None or record.stage is not _Stage.MOVING:
            return False
        record.stage = _Stage.OVER
        if record.released:
            del self._receiving[request_id]
        return True

    @property
    def open_requests(self) -> int:
        """Requests with a record: 0 when nothing is going on."""
        return len(self._receiving) + len(self._sending)


def _computes_itself(request: Request) -> bool:
    """Requests whose prompt this engine has to compute, whoever else has: it needs logits for all of it, it has
    been there before, or the prompt is not complete yet."""
    return bool(request.skip_reading_prefix_cache or request.num_preemptions or request.resumable)
