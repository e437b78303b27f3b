"""An engine process: steps one real vLLM engine in this very process and answers calls about it.

Only what runs in that process imports vLLM: the test's process imports this module to name `serve`.
"""

import os
import threading
from multiprocessing.connection import Connection
from typing import Any, cast

import psutil
from engines.calls import (
    Abort,
    Add,
    Answer,
    Ask,
    Call,
    Choice,
    Collect,
    Go,
    Hold,
    Look,
    Quit,
    Ready,
    Remains,
    Reset,
    Settle,
    State,
)

from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Event
from kvpush.runtime.counters import Counters
from kvpush.sim.orders import EngineConfig


class EngineChild:
    """The engine, the requests it has finished, and the one call that waits for an answer."""

    def __init__(self, config: EngineConfig, calls: Connection) -> None:
        from kvpush.sim.stepped import SteppedEngine

        self._calls = calls
        self._name = config.name
        self._engine = SteppedEngine(config)
        self._finished: dict[str, Answer | None] = {}
        self._waiting: Collect | Settle | Reset | None = None
        self._held = False
        self._steps = 0
        self._has_connector = bool(config.role)
        self._counters = Counters()
        if self._has_connector:
            self._tap_events()

    @property
    def _connector(self) -> Any:
        return self._engine.connector

    @property
    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return cast(Any, get_kv_transfer_group())._working

    @property
    def _transport(self) -> Any:
        return self._worker._thread._driver._transport

    def _tap_events(self) -> None:
        """Count everything that the worker's side sees, beside what it does itself."""
        inner = self._worker._on_event

        def both(event: Event) -> None:
            self._counters.add(event)
            inner(event)

        self._worker._on_event = both
        counting = self._connector.first_tokens._count

        def count(reason: Reason) -> None:
            self._counters.add(Counted("first_token", reason))
            counting(reason)

        self._connector.first_tokens._count = count

    def run(self) -> None:
        """Announce the engine, then step and answer until told to quit."""
        self._calls.send(self._ready())
        while True:
            busy = self._engine.is_busy and not self._held
            if self._waiting is None and self._calls.poll(0 if busy else 0.05):
                call = self._calls.recv()
                if isinstance(call, Quit):
                    return self._quit()
                self._take(call)
            if busy:
                self._step()
            self._answer_waiting()

    def _take(self, call: Call) -> None:
        match call:
            case Add(asks):
                for ask in asks:
                    self._add(ask)
            case Abort(request_ids):
                for name in request_ids:
                    self._engine.abort(name)
                self._finished.update(dict.fromkeys(request_ids))
            case Hold() | Go():
                self._held = isinstance(call, Hold)
            case Look():
                return self._calls.send(self._state())
            case Collect() | Settle() | Reset():
                if isinstance(call, Reset) and self._has_connector:
                    self._connector.reset_cache()
                self._waiting = call
                return None
        return self._calls.send(None)

    def _add(self, ask: Ask) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from kvpush.sim.stepped import transfer_args

        params = SamplingParams(
            n=ask.n,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            logprobs=ask.logprobs,
            stop_token_ids=list(ask.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            # several choices come in one output only at the end
            output_kind=RequestOutputKind.FINAL_ONLY if ask.n > 1 else RequestOutputKind.CUMULATIVE,
            skip_reading_prefix_cache=ask.skip_prefix_cache,
            extra_args=transfer_args(ask.params),
        )
        self._engine.add(ask.request_id, ask.prompt, params)

    def _step(self) -> None:
        self._steps += 1
        for output in self._engine.step():
            self._finished[output.request_id] = _answer(output)

    def _answer_waiting(self) -> None:
        match self._waiting:
            case Collect(request_ids) if all(name in self._finished for name in request_ids):
                answers = [self._finished.pop(name) for name in request_ids]
                self._reply(tuple(answer for answer in answers if answer is not None))
            case Settle() if not self._engine.is_busy:
                self._reply(self._state())
            case Reset() if not self._engine.is_busy and not self._state().kept:
                self._reply(self._engine.core.reset_prefix_cache())

    def _reply(self, answer: object) -> None:
        self._waiting = None
        self._calls.send(answer)

    def _ready(self) -> Ready:
        free = self._engine.free_blocks
        if not self._has_connector:
            return Ready(os.getpid(), "", 0, "", free)
        address = self._connector._address
        return Ready(os.getpid(), address.host, address.port, self._name, free)

    def _state(self) -> State:
        if self._has_connector and not self._engine.is_busy:
            self._hear()
        totals = self._counters
        return State(
            steps=self._steps,
            free_blocks=self._engine.free_blocks,
            requests=len(self._engine.scheduler.requests),
            open_transfers=self._connector._scheduling.open_requests if self._has_connector else 0,
            writes=len(self._transport._open.posted) if self._has_connector else 0,
            sockets=len(_sockets()),
            counted={f"{name} {reason}": number for (name, reason), number in totals.counted.items()},
            transfers={" ".join(how): number for how, number in totals.transfers.items()},
            nbytes={str(role): volume.nbytes for role, volume in totals.volumes.items()},
            delivered={" ".join(moved_by): number for moved_by, number in totals.modes.items()},
            chosen={peer: str(pair.mode) for peer, pair in totals.pairs.items()},
            reused=sum(volume.reused for volume in totals.volumes.values()),
            kept=self._connector._scheduling.kept_requests if self._has_connector else 0,
        )

    def _hear(self) -> None:
        """An idle engine takes no step, and so hears of nothing: let its connector hear what it would with the next."""
        from vllm.v1.outputs import KVConnectorOutput

        results, report = self._worker.results(), self._worker.report()
        output = KVConnectorOutput(finished_sending=results.finished_sending, kv_connector_worker_meta=report)
        self._connector.update_connector_output(output)

    def _quit(self) -> None:
        if not self._has_connector:
            self._engine.shutdown()
            return self._calls.send(Remains())
        transport, port = self._transport, self._connector._address.port
        self._engine.shutdown()
        threads = [thread.name for thread in threading.enumerate() if "kvpush" in thread.name]
        listening = [each for each in _sockets() if each.laddr and each.laddr.port == port]
        return self._calls.send(Remains(tuple(threads), int(transport._open is not None), len(listening)))


def _sockets() -> list[Any]:
    return [each for each in psutil.Process().net_connections("all") if each.fd >= 0]


def _answer(output: Any) -> Answer:
    return Answer(
        output.request_id,
        tuple(_choice(each) for each in sorted(output.outputs, key=lambda each: each.index)),
        output.num_cached_tokens or 0,
        output.kv_transfer_params,
    )


def _choice(output: Any) -> Choice:
    chosen = zip(output.logprobs or (), output.token_ids, strict=False)
    return Choice(tuple(output.token_ids), output.finish_reason, tuple(tops[token].logprob for tops, token in chosen))


def serve(config: EngineConfig, calls: Connection) -> None:
    """Make an engine, and serve it until told to quit. Raises `EOFError` when nobody calls any more."""
    os.environ.update(config.environment)
    EngineChild(config, calls).run()
