"""`kvpush bench micro`: kvpush's parts one by one, without engines."""

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np

from kvpush.bench import machine
from kvpush.bench.joined import Joined
from kvpush.bench.results import Machine
from kvpush.bench.wakeup import wake_up_seconds
from kvpush.core.ids import Epoch, Key, TransferId
from kvpush.core.layout import Group, Kind, Layout, Plane, Region, Span, one_head
from kvpush.core.messages import Heartbeat, Message, Register, decode_frame, encode_frame
from kvpush.core.planner import plan

_PROMPT = 2048
_BLOCK_SIZE = 16
_LAYERS = 80
_LINE = 256  # bytes of one token in one layer
_KEY = Key(TransferId("0123456789abcdef" * 2))


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: `value` in `unit`, the median of `repeats` runs unless `what` says otherwise."""

    name: str
    what: str
    value: float
    unit: str
    repeats: int


class MicroReport(msgspec.Struct, kw_only=True):
    """All figures of one run."""

    machine: Machine
    versions: dict[str, str]
    commit: str
    measures: list[Measure]


def run_micro() -> MicroReport:
    """Measure everything; takes about half a minute."""
    measures = [*_planner(), *_codec(), *_endpoint(), *_wake_up(), *_dataplane()]
    return MicroReport(
        machine=machine.describe_machine(),
        versions=machine.package_versions(),
        commit=machine.source_commit(),
        measures=measures,
    )


def seconds_of(call: Callable[[], object], repeats: int) -> list[float]:
    """How long each of `repeats` calls took."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def make_layout(blocks: int, layers: int = _LAYERS, base: int = 1 << 20) -> Layout:
    """Layer after layer, as vLLM's CPU backend allocates; no memory is behind it."""
    block = _BLOCK_SIZE * _LINE
    area = blocks * block
    planes = tuple(Plane(f"layer.{i}", Kind.PAIR, 0, base + i * area, block, block, _LINE) for i in range(layers))
    return one_head("micro", "bfloat16", _LINE, Group(_BLOCK_SIZE, blocks), planes, Region(base, area * layers))


# the planner --------------------------------------------------------------------------------------------
def _planner() -> list[Measure]:
    local, remote = make_layout(4096), make_layout(4096, base=1 << 40)
    in_order = tuple(range(2 * _PROMPT // _BLOCK_SIZE))
    rng = np.random.default_rng(1)
    shuffled = tuple(int(i) for i in rng.permutation(4096)[: len(in_order)])
    cases = (("contiguous", in_order), ("fragmented", shuffled))
    return [_plan(name, local, remote, (in_order,), (blocks,)) for name, blocks in cases]


def _plan(
    name: str, local: Layout, remote: Layout, mine: tuple[tuple[int, ...]], theirs: tuple[tuple[int, ...]]
) -> Measure:
    def call() -> int:
        return plan(Span(0, 2 * _PROMPT), local, mine, 0, remote, theirs, 0).descriptors

    descriptors = call()
    times = seconds_of(call, 30)
    what = f"plan 4,096 tokens of {_LAYERS} layers into a {name} pool: {descriptors} descriptors"
    return _measure(f"planner.{name}", what, np.median(times) * 1e3, "ms", 30)


# the codec ----------------------------------------------------------------------------------------------
def _codec() -> list[Measure]:
    blocks = (tuple(range(_PROMPT // _BLOCK_SIZE)),)
    register = Register(_KEY, Span(0, _PROMPT), blocks, 0.0)
    heartbeat = _heartbeat(1000)
    return [
        *_both_ways("register", f"a registration of {len(blocks[0])} blocks", register),
        *_both_ways("heartbeat", "a heartbeat of 1,000 keys", heartbeat),
    ]


def _heartbeat(keys: int) -> Message:
    names = tuple(Key(TransferId(f"{i:032x}")) for i in range(keys))
    return Heartbeat(0.0, names)


def _both_ways(name: str, what: str, message: Message) -> list[Measure]:
    source, destination = Epoch(1), Epoch(2)
    frame = encode_frame(source, destination, message)
    encode = seconds_of(lambda: encode_frame(source, destination, message), 2000)
    decode = seconds_of(lambda: decode_frame(frame), 2000)
    return [
        _measure(f"codec.encode_{name}", f"encode {what} ({len(frame)} bytes)", np.median(encode) * 1e6, "us", 2000),
        _measure(f"codec.decode_{name}", f"decode and check {what}", np.median(decode) * 1e6, "us", 2000),
    ]


# the endpoint -------------------------------------------------------------------------------------------
def _endpoint() -> list[Measure]:
    measures = []
    for in_flight in (1, 100, 10_000):
        joined = Joined(make_layout(64, layers=2))
        joined.open(in_flight)
        inputs, transfers = joined.inputs, 1000
        start = time.perf_counter()
        for _ in range(transfers):
            joined.deliver_oldest()
            joined.open(1)
        rate = (joined.inputs - inputs) / (time.perf_counter() - start)
        what = f"inputs that two endpoints take, {in_flight} transfers open, {transfers} delivered one by one"
        measures.append(_measure(f"endpoint.{in_flight}", what, rate, "inputs/s", 1))
    return measures


# the transfer thread ------------------------------------------------------------------------------------
def _wake_up() -> list[Measure]:
    times = wake_up_seconds(make_layout(64, layers=2), 300)
    what = "from submitting a command to the sleeping transfer thread until it executes it"
    return [
        _measure("thread.wake_up", what, np.median(times) * 1e6, "us", len(times)),
        _measure("thread.wake_up_p99", f"{what}, 99th percentile", np.percentile(times, 99) * 1e6, "us", len(times)),
    ]


# the data plane -----------------------------------------------------------------------------------------
def _dataplane() -> list[Measure]:
    """NIXL between two processes; left out where NIXL is not installed."""
    name = "kvpush.bench.micro_dataplane"
    if find_spec("nixl") is None or find_spec(name) is None:
        return []
    return list(import_module(name).measure())


def _measure(name: str, what: str, value: float | np.floating[Any], unit: str, repeats: int) -> Measure:
    return Measure(name=name, what=what, value=round(float(value), 3), unit=unit, repeats=repeats)
