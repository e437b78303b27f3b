"""CPU that connector hooks take of an engine's threads, for any connector: wraps the hooks from outside.

A hook that waits costs no CPU, but holds its thread up: so the longest call is noted by the clock on the wall. Of
the hooks that are called for each layer one call in `EVERY` is timed, and counts for all of them.

The clock takes part of what it counts: a hook that does nothing is counted with a third of a microsecond. What that is
in a process is measured when its clock is made, and can be taken off (`HookTime.own_us`), for all connectors alike.

Loaded into each engine process by vLLM (`vllm.general_plugins`); does nothing unless `KVPUSH_HOOK_TIMES` names a
folder. Counters live in a memory-mapped file, so that they can be read at any moment and outlive a killed process.
The scheduler's side also notes when each request reached the engine.
"""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

VARIABLE = "KVPUSH_HOOK_TIMES"

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "has_pending_push_work",
    "has_pending_block_frees",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
HOOKS = SCHEDULER_HOOKS + WORKER_HOOKS
_PER_LAYER = frozenset({"wait_for_layer_load", "save_kv_layer"})
"""Called so often, and so short, that asking each time for their CPU, a system call, would slow the step down."""
EVERY = 7
"""Prime to the number of layers of most models, so that it is another layer's turn in each step."""
_FIELDS = 4  # calls, ns of CPU, longest ns, ns that the clock counts for a call that does nothing
_BYTES = len(HOOKS) * _FIELDS * 8
_TRIALS = 2_000
_LOW = 0.1
"""Of the trials, the quantile that is taken. In an engine, between other work, the clock is slower than when it is
tried again and again; so this is less than its true share, and what is taken off never too much."""


class HookTime(msgspec.Struct, frozen=True, kw_only=True):
    """Of one hook in one process, in some time: `cpu_us` of the threads that called it, `clock_us` of which are the
    clock's at least; and how long the longest call since the process began took, whatever it did meanwhile."""

    calls: int
    cpu_us: float
    clock_us: float
    longest_us: float

    @property
    def own_us(self) -> float:
        """What the hook itself has used, without the clock."""
        return max(0.0, self.cpu_us - self.clock_us)

    def since(self, before: "HookTime | None") -> "HookTime":
        """What has been added to an earlier reading; None: there was none."""
        if before is None:
            return self
        return HookTime(
            calls=self.calls - before.calls,
            cpu_us=self.cpu_us - before.cpu_us,
            clock_us=self.clock_us - before.clock_us,
            longest_us=self.longest_us,
        )


class Arrival(msgspec.Struct, frozen=True):
    """A request reached the engine's core at `at` (monotonic seconds)."""

    request_id: str
    at: float


class HookClock:
    """The counters of one process."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._slots = memoryview(self._map).cast("q")
        self._empty_ns = _count_empty_call()

    def wrap(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed as `hook`."""
        first = HOOKS.index(hook) * _FIELDS
        slots = self._slots[first : first + _FIELDS]
        slots[3] = self._empty_ns
        return _timed(call, slots, EVERY if hook in _PER_LAYER else 1)


def _timed(call: Callable[..., Any], slots: memoryview, every: int) -> Callable[..., Any]:
    wall, cpu = time.perf_counter_ns, time.thread_time_ns

    def timed(*args: Any, **kwargs: Any) -> Any:
        slots[0] += 1
        if slots[0] % every:
            return call(*args, **kwargs)
        began, used = wall(), cpu()
        try:
            return call(*args, **kwargs)
        finally:
            used, took = cpu() - used, wall() - began
            slots[1] += used * every
            if took > slots[2]:
                slots[2] = took

    return timed


def _count_empty_call() -> int:
    """How many ns are counted for a hook that does nothing."""
    slots = memoryview(bytearray(_FIELDS * 8)).cast("q")
    empty, counted = _timed(lambda: None, slots, 1), []
    for _ in range(_TRIALS):
        slots[1] = 0
        empty()
        counted.append(slots[1])
    return sorted(counted)[int(_TRIALS * _LOW)]


def read_clock(path: Path) -> dict[str, HookTime]:
    """The counters in a file of `HookClock`, for hooks that were called."""
    slots = memoryview(path.read_bytes()).cast("q")
    rows = {hook: slots[i * _FIELDS : (i + 1) * _FIELDS] for i, hook in enumerate(HOOKS)}
    return {
        hook: HookTime(calls=row[0], cpu_us=row[1] / 1e3, clock_us=row[0] * row[3] / 1e3, longest_us=row[2] / 1e3)
        for hook, row in rows.items()
        if row[0]
    }


def read_arrivals(path: Path) -> list[Arrival]:
    """The requests that reached an engine; a line cut off by a kill is left out."""
    decoder = msgspec.json.Decoder(Arrival)
    return [decoder.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]


def clock_file(folder: Path, engine: str, side: str) -> Path:
    """`side` is "scheduler" or "worker"."""
    return folder / f"hooks-{engine}-{side}.bin"


def arrivals_file(folder: Path, engine: str) -> Path:
    """Of one engine."""
    return folder / f"arrivals-{engine}.jsonl"


def register() -> None:
    """Time the hooks of connectors that this process makes, when asked to by the environment."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    made = KVConnectorFactory.create_connector

    def create(config: Any, role: Any, kv_cache_config: Any) -> Any:
        connector = made(config, role, kv_cache_config)
        engine = config.kv_transfer_config.engine_id
        is_scheduler = role is KVConnectorRole.SCHEDULER
        _time_hooks(
            connector, clock_file(Path(folder), engine, "scheduler" if is_scheduler else "worker"), is_scheduler
        )
        if is_scheduler:
            _note_arrivals(connector, arrivals_file(Path(folder), engine))
        return connector

    KVConnectorFactory.create_connector = create


def _time_hooks(connector: Any, path: Path, is_scheduler: bool) -> None:
    clock = HookClock(path)
    for hook in SCHEDULER_HOOKS if is_scheduler else WORKER_HOOKS:
        if (call := getattr(connector, hook, None)) is not None:
            setattr(connector, hook, clock.wrap(hook, call))


def _note_arrivals(connector: Any, path: Path) -> None:
    file: BinaryIO = path.open("ab", buffering=0)
    inner = connector.on_new_request

    def on_new_request(request: Any) -> None:
        file.write(msgspec.json.encode(Arrival(request.request_id, time.monotonic())) + b"\n")
        inner(request)

    connector.on_new_request = on_new_request
