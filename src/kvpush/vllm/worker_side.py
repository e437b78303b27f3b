"""The connector in a worker: hands commands to the rank's transfer thread and reports what has ended.

Owned by vLLM's worker thread; the transfer thread is reached through its mailbox only. Nothing here waits, and
nothing here may end the worker: what fails is logged, and the requests concerned are reported as failed.
"""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvpush.core.commands import Command, Final, Inquire, Keep, Receive, Watch, Withdraw
from kvpush.core.events import BlocksSafe, Event, Found, Outcome, PrefillBegun, Purpose, ReceiveEnded, SourceFree
from kvpush.core.ids import Address
from kvpush.runtime.gate import Gate
from kvpush.runtime.thread import ThreadConfig, TransferThread
from kvpush.transport.base import Transport
from kvpush.transport.nixl import NixlTransport
from kvpush.vllm.device import recorder_for
from kvpush.vllm.layouts import read_layout
from kvpush.vllm.localize import localize
from kvpush.vllm.metadata import RankReport, StepCommands
from kvpush.vllm.ranks import Rank, engine_group, engine_id
from kvpush.vllm.settings import Push, Settings
from kvpush.vllm.step_push import StepPush

logger = logging.getLogger(__name__)

STEPS_AHEAD = 16
"""For how many steps an event waits for the one that brings its command: more than vLLM ever has under way. After that
it is one that vLLM does not wait for, such as the end of a request that never got blocks."""

_NOTHING = RankReport()


@dataclass
class _Owed:
    """Request ids that vLLM waits for a word about, from this rank."""

    received: dict[str, Purpose] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)

    def note(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Watch):
                self.begun.add(command.request_id)
            elif isinstance(command, Receive):
                self.begun.discard(command.request_id)
                self.received[command.request_id] = command.purpose
            elif isinstance(command, Inquire):
                self.found.add(command.request_id)
            elif (
                isinstance(command, Keep)
                or (isinstance(command, Final) and command.last)
                or isinstance(command, Withdraw)
            ):
                self.sent.add(command.request_id)


class WorkerSide:
    """One rank's caches, its transfer thread and what is owed to vLLM."""

    def __init__(
        self,
        config: VllmConfig,
        cache_config: KVCacheConfig,
        settings: Settings,
        push: Push,
        on_event: Callable[[Event], None],
    ) -> None:
        """`on_event` sees every event once, for metrics and logs."""
        self._config = config
        self._cache_config = cache_config
        self._settings = settings
        self._push = push
        self._on_event = on_event
        self._rank = 0
        self._thread: TransferThread | None = None
        self._gate: Gate | None = None
        self._step: StepPush | None = None
        self._owed = _Owed()
        self._ahead: deque[tuple[int, Event]] = deque()  # and at which step they came
        self._steps = 0
        self._quarantined: set[str] = set()
        self._report = _NOTHING
        self.address: Address | None = None
        self.local_path = ""

    def start(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read the caches' layout and start the transfer thread.

        Raises `ConfigError`, `ControlError` or `TransportError`: an engine that cannot transfer must not start.
        """
        rank = Rank.of_this_process()
        cache = read_layout(kv_caches, self._cache_config, self._config, rank, self._settings.model)
        listen = self._settings.address(engine_group(self._config), rank.index, rank.ranks)
        thread_config = ThreadConfig(
            engine_id=engine_id(self._config),
            listen=listen,
            mode=self._settings.mode,
            protocol=self._settings.protocol,
            secret=self._settings.secret,
            poll_us=self._settings.poll_us,
            switch_us=self._settings.switch_us,
        )
        ours = partial(localize, rank=rank, cache=cache)
        thread = TransferThread(thread_config, cache.layout, self._make_transport, ours)
        self.address = thread.start()
        self.local_path = thread.local_path
        self._rank, self._thread = rank.index, thread
        self._gate = Gate(thread.submit, f"kvpush-gate-{thread_config.engine_id}")
        device = next(iter(kv_caches.values())).device
        self._step = StepPush(self._push, cache.layout, self._gate, recorder_for(device))
        logger.info("kvpush: rank %d of %s listens on %s", rank.index, thread_config.engine_id, self.address)

    def _make_transport(self) -> Transport:
        name = f"{engine_id(self._config)}/{secrets.token_hex(8)}"
        return NixlTransport(name, {backend: {} for backend in self._settings.backends})

    def begin_step(self, step: StepCommands) -> bool:
        """Pass on a step's commands that the transfer thread has not heard, before the step runs. Whether it is worth
        to hear of each layer of it (`layer_launched`)."""
        if self._gate is None or self._step is None:
            return False
        if step.commands or step.finals.finals:
            self._owed.note((*step.commands, *step.finals.finals))
            if commands := step.unheard(self._rank):
                self._gate.submit(commands)
        return self._step.begin(step.finals)

    def layer_launched(self, name: str) -> None:
        """An attention layer of the running step has been launched."""
        if self._step is not None:
            self._step.layer_launched(name)

    def forward_launched(self) -> None:
        """The running step's forward pass has been launched."""
        if self._step is not None:
            self._step.launched()

    def results(self) -> KVConnectorTransferResults:
        """What has ended since the last call, each request once."""
        results = KVConnectorTransferResults()
        if self._thread is None:
            return results
        self._steps += 1
        for _ in range(len(self._ahead)):
            since, event = self._ahead.popleft()
            if not self._settle(event, results) and self._steps < since + STEPS_AHEAD:
                self._ahead.append((since, event))
        for event in self._thread.drain():
            self._on_event(event)
            if not self._settle(event, results):
                self._ahead.append((self._steps, event))
        if not self._thread.alive:
            self._give_up(results)
        return results

    def _settle(self, event: Event, results: KVConnectorTransferResults) -> bool:
        """Report an event. False when its command, heard directly, has not come with a step yet."""
        if isinstance(event, ReceiveEnded) and event.request_id in self._owed.received:
            self._note_received(event, results)
        elif isinstance(event, PrefillBegun):
            self._owed.begun.discard(event.request_id)
            self._say(RankReport(begun=(event.request_id,)))
        elif isinstance(event, Found) and event.request_id in self._owed.found:
            self._owed.found.remove(event.request_id)
            self._say(RankReport(found=((event.request_id, event.tokens),)))
        elif isinstance(event, BlocksSafe) and event.request_id in self._quarantined:
            self._quarantined.remove(event.request_id)
            self._say(RankReport(released=(event.request_id,)))
        elif isinstance(event, SourceFree) and event.request_id in self._owed.sent:
            self._owed.sent.remove(event.request_id)
            results.finished_sending.add(event.request_id)
        else:
            return not isinstance(event, ReceiveEnded | Found | BlocksSafe | SourceFree)
        return True

    def _note_received(self, event: ReceiveEnded, results: KVConnectorTransferResults) -> None:
        name = event.request_id
        results.finished_recving.add(name)
        purpose = self._owed.received.pop(name)
        if event.outcome is not Outcome.DELIVERED:
            self._note_failure(name, purpose, results)
        if event.quarantined:
            self._quarantined.add(name)
            self._say(RankReport(kept=(name,)))
        if event.token is not None:
            self._say(RankReport(tokens=((name, event.token),)))

    def _note_failure(self, request_id: str, purpose: Purpose, results: KVConnectorTransferResults) -> None:
        """A prompt that has not come is a matter of vLLM's policy; an earlier turn is just computed again."""
        if purpose is Purpose.PROMPT:
            results.failed_recving.add(request_id)
        else:
            self._say(RankReport(lost=(request_id,)))

    def _say(self, news: RankReport) -> None:
        self._report = self._report.aggregate(news)

    def report(self) -> RankReport | None:
        """What to tell the scheduler with the `results` of the same step, beyond those."""
        report, self._report = self._report, _NOTHING
        return report if report is not _NOTHING else None

    def _give_up(self, results: KVConnectorTransferResults) -> None:
        """The thread has died, and its transport with it: nothing is written or read any more."""
        owed, self._owed = self._owed, _Owed()
        nothing = tuple((name, 0) for name in owed.found)
        self._say(RankReport(released=tuple(self._quarantined), begun=tuple(owed.begun), found=nothing))
        self._quarantined = set()
        if not (owed.received or owed.sent):
            return
        logger.error("kvpush: the transfer thread is dead; %d receives fail", len(owed.received))
        for name, purpose in owed.received.items():
            self._note_failure(name, purpose, results)
        results.finished_recving |= owed.received.keys()
        results.finished_sending |= owed.sent

    def stop(self) -> None:
        """End every transfer and the thread; idempotent, bounded by `stop_s`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._gate is not None:
            self._gate.close()
        for event in thread.stop():
            self._on_event(event)
