"""A stepped engine that obeys orders as they come over a line, and reports what happens when it happens."""

import os
from multiprocessing.connection import Connection
from typing import Any

from vllm import SamplingParams
from vllm.v1.metrics.loggers import StatLoggerBase

from kvpush.runtime.counters import Counters
from kvpush.sim.orders import End, EngineConfig, Expose, Exposed, Finished, Leave, Order, Standing, Submit, Tell
from kvpush.sim.stepped import SteppedEngine, transfer_args
from kvpush.vllm.metrics import EngineStats, exposition

_QUIET_S = 0.02


class _Tally(StatLoggerBase):
    """Adds up what the connector counts, from where `/metrics` gets it."""

    def __init__(self) -> None:
        self.counters = Counters()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Take one step's figures."""
        if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
            self.counters.merge(EngineStats(scheduler_stats.kv_connector_stats).counters)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class _Obedient:
    def __init__(self, config: EngineConfig, line: Connection) -> None:
        self._line = line
        self._tally = _Tally()
        self._engine = SteppedEngine(config, self._tally)

    def run(self) -> None:
        """Obey until told to end."""
        self._tell()
        while True:
            busy = self._engine.is_busy
            while self._line.poll(0 if busy else _QUIET_S):
                order: Order = self._line.recv()
                if isinstance(order, End):
                    return self._engine.shutdown()
                self._obey(order)
                busy = True
            if busy:
                self._step()

    def _obey(self, order: Order) -> None:
        match order:
            case Submit():
                self._submit(order)
            case Leave(name):
                self._engine.abort(name)
            case Tell():
                self._tell()
            case Expose():
                self._line.send(Exposed(exposition()))

    def _submit(self, order: Submit) -> None:
        params = SamplingParams(
            max_tokens=order.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args=transfer_args(order.params),
        )
        self._engine.add(order.name, order.prompt, params)

    def _step(self) -> None:
        for output in self._engine.step():
            choice = output.outputs[0]
            cached = output.num_cached_tokens or 0
            self._line.send(Finished(output.request_id, tuple(choice.token_ids), str(choice.finish_reason), cached))

    def _tell(self) -> None:
        requests = len(self._engine.scheduler.requests)
        self._line.send(Standing(self._engine.free_blocks, requests, self._tally.counters))


def serve(config: EngineConfig, line: Connection) -> None:
    """Be the engine, in this process, until told to end. Raises `EOFError` when nobody is left to obey."""
    os.environ.update(config.environment)
    _Obedient(config, line).run()
