"""Planning and moving descriptors by their number: the planner on awkward layouts, NIXL between two processes."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpush.bench.micro import Measure
from kvpush.core.errors import KVPushError
from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import Group, Kind, Layout, Plane, Region, Span
from kvpush.core.mode import Mode
from kvpush.core.planner import Plan, plan
from kvpush.transport.base import OpDone
from kvpush.transport.nixl import NixlTransport

PIECE = 4096
"""Bytes per descriptor: one block of 16 tokens of one layer, of a 70B model on four GPUs."""
COUNTS = (160, 1888, 10240)
REPEATS = 5
WAYS: Mapping[str, Mapping[str, str]] = {"default": {}, "tcp": {"UCX_TLS": "tcp"}}
"""UCX's own choice (shared memory on one host), and TCP, which behaves more like a network."""
_SAID = {"default": "by the way UCX chooses", "tcp": "over TCP"}
_OPERATIONS = {Mode.PUSH: "write", Mode.PULL: "read"}
_Job = Callable[[Connection, tuple[int, ...], int], None]

_RECEIVER = PeerName("receiver")
_WAIT_S = 60.0


@dataclass(frozen=True)
class Moved:
    """How long one write or read of `descriptors` scattered descriptors of `PIECE` bytes took, in seconds.

    `post_s` holds the calling thread; it was done `wire_s` after that.
    """

    mode: Mode
    descriptors: int
    post_s: float
    wire_s: float


def measure() -> list[Measure]:
    """All figures of this module; takes some 20 seconds."""
    return [*_planner_measures(), *(each for way in WAYS for each in _nixl_measures(way))]


# the planner --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Arrangement:
    """How one side keeps 2,048 tokens of 80 layers; `heads_first`: HND rather than NHD order."""

    block_size: int = 16
    heads: int = 1
    heads_first: bool = False


ARRANGEMENTS: Mapping[str, tuple[Arrangement, Arrangement]] = {
    "equal": (Arrangement(), Arrangement()),
    "unequal_blocks": (Arrangement(), Arrangement(block_size=128)),
    "other_head_order": (Arrangement(heads=2), Arrangement(heads=2, heads_first=True)),
}


def planned(mine: Arrangement, theirs: Arrangement, repeats: int = REPEATS) -> tuple[int, list[float]]:
    """Descriptors of a plan between scattered blocks, and the seconds that each of `repeats` plans took."""
    local, remote = _layout(mine, 1 << 20), _layout(theirs, 1 << 45)
    rng = np.random.default_rng(3)
    tables = [(tuple(rng.permutation(4096)[: 2048 // each.block_size].tolist()),) for each in (mine, theirs)]
    times, made = [], Plan(*(np.empty(0, np.int64) for _ in range(3)))
    for _ in range(repeats + 1):
        start = perf_counter()
        made = plan(Span(0, 2048), local, tables[0], 0, remote, tables[1], 0)
        times.append(perf_counter() - start)
    return made.descriptors, times[1:]  # the first one also works out the pair of layouts


def _layout(arrangement: Arrangement, base: int) -> Layout:
    line, size, heads = 128, arrangement.block_size, arrangement.heads
    block = heads * size * line
    head, token = (size * line, line) if arrangement.heads_first else (line, heads * line)
    planes = tuple(
        Plane(f"layers.{layer}", kind, 0, base + (2 * layer + which) * 4096 * block, block, head, token)
        for layer in range(80)
        for which, kind in enumerate((Kind.KEY, Kind.VALUE))
    )
    regions = (Region(base, 160 * 4096 * block),)
    return Layout("micro", "bfloat16", line, heads, 0, heads, 0, 1, "dram", (Group(size, 4096),), planes, regions)


def _planner_measures() -> Iterator[Measure]:
    for name, (mine, theirs) in ARRANGEMENTS.items():
        descriptors, times = planned(mine, theirs)
        what = f"plan 2,048 tokens of 80 layers, {name.replace('_', ' ')}: {descriptors} descriptors"
        yield _median(f"planner.{name}", what, times, 1e3, "ms")


# NIXL ---------------------------------------------------------------------------------------------------
def moved(way: str, counts: tuple[int, ...] = COUNTS, repeats: int = REPEATS) -> list[Moved]:
    """Writes and reads of each number of descriptors between two new processes, `repeats` times each.

    Raises `KVPushError` when a process ends early or does not answer.
    """
    spawn = multiprocessing.get_context("spawn")
    (ours, receiving), (others, sending) = spawn.Pipe(), spawn.Pipe()
    jobs = ((_receive, receiving, counts, repeats), (_send, sending, counts, repeats))
    processes = [spawn.Process(target=_in_way, args=(dict(WAYS[way]), *job), daemon=True) for job in jobs]
    for process in processes:
        process.start()
    try:
        others.send(_answer(ours))
        rows: list[Moved] = _answer(others)
        return rows
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(_WAIT_S):
        raise KVPushError(f"a process of the measurement has not answered in {_WAIT_S:.0f} s")
    return pipe.recv()


def _in_way(environment: Mapping[str, str], job: _Job, pipe: Connection, counts: tuple[int, ...], repeats: int) -> None:
    os.environ.update(environment)
    job(pipe, counts, repeats)


def _memory(transport: NixlTransport, counts: tuple[int, ...]) -> NDArray[np.uint8]:
    """Twice as much as the largest write, so that scattered pieces do not touch; every page is there."""
    memory = np.ones(2 * max(counts) * PIECE, np.uint8)
    transport.register((Region(memory.ctypes.data, memory.nbytes),), "dram")
    return memory


def _receive(pipe: Connection, counts: tuple[int, ...], repeats: int) -> None:
    transport = NixlTransport("receiver")
    memory = _memory(transport, counts)
    pipe.send((transport.metadata, memory.ctypes.data))
    while True:
        transport.poll()


def _send(pipe: Connection, counts: tuple[int, ...], repeats: int) -> None:
    transport = NixlTransport("sender")
    memory = _memory(transport, counts)
    metadata, address = pipe.recv()
    transport.add_peer(_RECEIVER, metadata)
    rng = np.random.default_rng(5)
    rows = []
    for count, mode in product(counts, Mode):
        _move(transport, mode, _scattered(rng, memory.ctypes.data, address, count))  # connects, faults pages in
        rows += [_move(transport, mode, _scattered(rng, memory.ctypes.data, address, count)) for _ in range(repeats)]
    pipe.send(rows)
    pipe.poll(None)


def _scattered(rng: np.random.Generator, local: int, remote: int, count: int) -> Plan:
    """Pieces in every other place, in no order on either side: no two can be merged."""
    places = [rng.permutation(count).astype(np.int64) * 2 * PIECE for _ in range(2)]
    return Plan(places[0] + local, places[1] + remote, np.full(count, PIECE, np.int64))


def _move(transport: NixlTransport, mode: Mode, pieces: Plan) -> Moved:
    start = perf_counter()
    if mode is Mode.PUSH:
        transport.post_write(OpId(1), _RECEIVER, pieces, b"micro")
    else:
        transport.post_read(OpId(-1), _RECEIVER, pieces)
    posted = perf_counter()
    while not (done := [event for event in transport.poll() if isinstance(event, OpDone)]):
        pass
    if done[0].error:
        raise KVPushError(f"a {_OPERATIONS[mode]} failed: {done[0].error}")
    return Moved(mode, pieces.descriptors, posted - start, perf_counter() - posted)


def _nixl_measures(way: str) -> Iterator[Measure]:
    rows = moved(way)
    for count, mode in product(COUNTS, Mode):
        these = [row for row in rows if (row.descriptors, row.mode) == (count, mode)]
        name, operation = f"nixl.{way}.{_OPERATIONS[mode]}.{count}", _OPERATIONS[mode]
        pieces = f"{count:,} scattered descriptors of {PIECE // 1024} KiB"
        what = f"a {operation} of {pieces} between two processes, {_SAID[way]}"
        yield _median(f"{name}.post", f"post {what}", [row.post_s for row in these], 1e3, "ms")
        yield _median(f"{name}.wire", f"then finish {what}", [row.wire_s for row in these], 1e3, "ms")


def _median(name: str, what: str, seconds: list[float], scale: float, unit: str) -> Measure:
    value = round(float(np.median(seconds)) * scale, 3)
    return Measure(name=name, what=what, value=value, unit=unit, repeats=len(seconds))
