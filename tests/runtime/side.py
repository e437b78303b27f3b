"""One side of a transfer: a transfer thread with a small KV cache of its own."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from runtime.rig import LOCAL, until

from kvpush.core.commands import Announce, Command, Final, Receive
from kvpush.core.config import ProtocolConfig
from kvpush.core.events import Ended, Event, ReceiveEnded, SourceFree, TransferRecord
from kvpush.core.ids import Address, EngineId, Key, RequestId, Target, TransferId
from kvpush.core.layout import Group, Kind, Layout, Plane, Region, Span
from kvpush.core.mode import Mode, ModeSetting
from kvpush.runtime.thread import ThreadConfig, TransferThread
from kvpush.transport.base import Transport

LAYERS, KINDS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_BYTES = 3, 2, 64, 4, 2, 64
SETTLING = BLOCKS - 1
TOKEN_BYTES = LAYERS * KINDS * HEADS * HEAD_BYTES

BRISK = ProtocolConfig(
    lease_s=4.0,
    heartbeat_s=0.2,
    peer_timeout_s=2.0,
    connect_timeout_s=2.0,
    retry_s=0.2,
    unannounced_s=2.0,
    notice_grace_s=1.0,
    quarantine_s=2.0,
    stop_s=3.0,
)

_numbers = itertools.count(1)


def new_key() -> Key:
    return Key(TransferId(f"{next(_numbers):032x}"))


class Side:
    """A `TransferThread` over a cache of `BLOCKS` blocks, and everything that it has told."""

    def __init__(
        self,
        name: str,
        make_transport: Callable[[], Transport],
        secret: str = "",
        protocol: ProtocolConfig = BRISK,
        config: ThreadConfig | None = None,
    ) -> None:
        """`config` takes the place of name, secret and protocol. Transfers are pushed unless `receive` says otherwise:
        they are too small for a choice."""
        # planes, blocks, tokens, heads, bytes
        self.cache: NDArray[np.uint8] = np.zeros((LAYERS * KINDS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_BYTES), np.uint8)
        config = config or ThreadConfig(
            engine_id=EngineId(name), listen=LOCAL, secret=secret, protocol=protocol, mode=ModeSetting.AUTO
        )
        self._config, self._make_transport = config, make_transport
        self.thread = TransferThread(config, self._layout(), make_transport)
        self.events: list[Event] = []

    def _layout(self) -> Layout:
        block, head, token = self.cache.strides[1], self.cache.strides[3], self.cache.strides[2]
        planes = tuple(
            Plane(f"layer.{layer}", kind, 0, self.cache[index].ctypes.data, block, head, token)
            for index, (layer, kind) in enumerate(itertools.product(range(LAYERS), (Kind.KEY, Kind.VALUE)))
        )
        return Layout(
            model="test",
            dtype="uint8",
            head_bytes=HEAD_BYTES,
            total_heads=HEADS,
            head_start=0,
            head_end=HEADS,
            tp_rank=0,
            tp_size=1,
            memory="dram",
            groups=(Group(BLOCK_SIZE, BLOCKS),),
            planes=planes,
            regions=(Region(self.cache.ctypes.data, self.cache.nbytes),),
        )

    def listen_on(self, address: Address) -> None:
        """Listen there instead of on a free port; before `start`."""
        config = replace(self._config, listen=address)
        self.thread = TransferThread(config, self._layout(), self._make_transport)

    def localize_with(self, localize: Callable[[Command], Command]) -> None:
        """Make commands ours with that; before `start`."""
        self.thread.stop()
        self.thread = TransferThread(self._config, self._layout(), self._make_transport, localize)

    def start(self) -> Address:
        self.address = self.thread.start()
        return self.address

    def fill(self, seed: int) -> None:
        self.cache[:] = np.random.default_rng(seed).integers(1, 256, self.cache.shape, np.uint8)

    def tokens(self, span: Span, blocks: tuple[int, ...]) -> bytes:
        """The bytes of tokens `span` of a prompt whose first token is the first of `blocks`."""
        in_order = self.cache[:, list(blocks)].reshape(LAYERS * KINDS, -1, HEADS, HEAD_BYTES)
        return in_order[:, span.start : span.end].tobytes()

    def submit(self, *commands: Command) -> None:
        self.thread.submit(commands)

    def drain(self) -> list[Event]:
        """All events so far."""
        self.events += self.thread.drain()
        return self.events

    def stop(self) -> list[Event]:
        self.events += self.thread.stop()
        return self.events

    def turns(self) -> int:
        return self.thread.turns


@contextmanager
def running(*sides: Side) -> Iterator[None]:
    """The sides run while this block lasts."""
    for side in sides:
        side.start()
    try:
        yield
    finally:
        for side in sides:
            side.stop()


def answers(events: Iterable[Event], key: Key) -> list[ReceiveEnded | SourceFree]:
    """What the engine has been promised about a transfer."""
    return [event for event in events if isinstance(event, ReceiveEnded | SourceFree) and event.key == key]


def records(events: Iterable[Event], key: Key) -> list[TransferRecord]:
    return [event.record for event in events if isinstance(event, Ended) and event.record.key == key]


def announce(key: Key) -> Announce:
    return Announce(key, RequestId(f"send-{key}"))


def final(key: Key, tokens: int, blocks: tuple[int, ...]) -> Final:
    return Final(key, RequestId(f"send-{key}"), tokens, (blocks,))


def receive(
    key: Key,
    sender: Address,
    tokens: int,
    blocks: tuple[int, ...],
    engine: str | None = None,
    mode: Mode | None = None,
) -> Receive:
    target = Target(sender, EngineId(engine) if engine else None)
    return Receive(key, RequestId(f"recv-{key}"), target, Span(0, tokens), (blocks,), mode=mode)


def answer(side: Side, key: Key, within_s: float = 10.0) -> ReceiveEnded | SourceFree:
    """Wait for the one answer about `key`."""
    return until(lambda: answers(side.drain(), key), within_s)[0]


def push(sender: Side, receiver: Side, tokens: int, here: tuple[int, ...], there: tuple[int, ...]) -> ReceiveEnded:
    """One prompt, from the blocks `here` of the sender to `there` of the receiver, to its end on both sides."""
    key = new_key()
    receiver.submit(receive(key, sender.address, tokens, there))
    sender.submit(final(key, tokens, here))
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    answer(sender, key)
    return ended


def settle(sender: Side, receiver: Side) -> None:
    """Let all that was submitted reach the other side: a later push has come through. It uses block `SETTLING`."""
    push(sender, receiver, 1, (SETTLING,), (SETTLING,))
