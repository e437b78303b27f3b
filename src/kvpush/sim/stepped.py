"""A real vLLM engine in one process: stepped by hand, told what to do over a connection, and cheap to kill.

Runs in a child process (see bench/soak_fleet.py) whose environment has `VLLM_ENABLE_V1_MULTIPROCESSING=0`, so that
scheduler, worker and connector are all in it. Orders are obeyed as they come, reports are sent as they happen.
"""

import contextlib
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

from kvpush.runtime.counters import Counters
from kvpush.sim.orders import End, Expose, Exposed, Finished, Leave, Order, Standing, SteppedEngine, Submit, Tell
from kvpush.vllm.metrics import EngineStats, exposition

_IDLE_S = 0.001
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


class _Stepper:
    def __init__(self, what: SteppedEngine, line: Connection) -> None:
        self._line = line
        self._tally = _Tally()
        self._engine = LLMEngine.from_engine_args(_arguments(what), stat_loggers=[lambda *_: self._tally])
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._internal: dict[str, str] = {}

    def run(self) -> None:
        """Obey until told to end, or until nobody is left to obey."""
        self._tell()
        while True:
            busy = bool(self._scheduler.has_requests())
            while self._line.poll(0 if busy else _QUIET_S):
                order: Order = self._line.recv()
                if isinstance(order, End):
                    self._engine.engine_core.shutdown()
                    return
                self._obey(order)
                busy = True
            if busy:
                self._step()

    def _obey(self, order: Order) -> None:
        match order:
            case Submit(name=name):
                extra = {"kv_transfer_params": dict(order.params)} if order.params else None
                params = SamplingParams(
                    max_tokens=order.max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
                )
                prompt = {"prompt_token_ids": list(order.prompt)}
                self._internal[name] = self._engine.add_request(name, prompt, params)
            case Leave(name) if name in self._internal:
                self._engine.abort_request([self._internal.pop(name)], internal=True)
            case Tell():
                self._tell()
            case Expose():
                self._line.send(Exposed(exposition()))

    def _step(self) -> None:
        outputs = self._engine.step()
        for output in outputs:
            if output.finished and self._internal.pop(output.request_id, None):
                choice = output.outputs[0]
                cached = output.num_cached_tokens or 0
                self._line.send(Finished(output.request_id, tuple(choice.token_ids), str(choice.finish_reason), cached))
        if not outputs:
            time.sleep(_IDLE_S)  # as vLLM's own loop does, so that the transfer thread gets the interpreter

    def _tell(self) -> None:
        address = getattr(self._scheduler.connector, "_address", None)
        host, port = (address.host, address.port) if address else ("", 0)
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        standing = Standing(host, port, free, len(self._scheduler.requests), self._tally.counters)
        self._line.send(standing)


def _arguments(what: SteppedEngine) -> EngineArgs:
    transfer = {
        "kv_connector": "KVPushConnector",
        "kv_role": what.role,
        "engine_id": what.name,
        "kv_load_failure_policy": what.policy,
        "kv_connector_extra_config": dict(what.extra),
    }
    return EngineArgs(
        model=what.model,
        dtype="float32",
        enforce_eager=True,
        block_size=what.block_size,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=what.max_num_seqs,
        num_gpu_blocks_override=what.num_blocks,
        kv_transfer_config=transfer if what.role else None,
        disable_log_stats=False,
        seed=0,
    )


def serve(what: SteppedEngine, line: Connection) -> None:
    """Be the engine, in this process, until told to end; never returns."""
    status = 1
    try:
        log = os.open(what.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        with contextlib.suppress(EOFError, BrokenPipeError):
            _Stepper(what, line).run()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
