"""A sender that was stopped for longer than its leases moves no byte when it goes on."""

import threading
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from runtime.rig import until
from runtime.side import BRISK, Side, announce, answer, answers, final, new_key, receive, running, settle

from kvpush.core.events import Outcome, ReceiveEnded
from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import Region, Span
from kvpush.core.planner import Plan
from kvpush.transport.base import Transport, TransportEvent
from kvpush.transport.memory import MemoryFabric

TOKENS, HERE, THERE, ELSEWHERE = 10, (3, 1, 4), (5, 9, 2), (6, 7, 8)
SHORT = replace(BRISK, lease_s=1.0, quarantine_s=1.0, peer_timeout_s=0.8)


class Freezer:
    """Passes everything on to a transport, but stands still in post number `until_frozen` from now until `thaw`.
    `calls` are all since."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.until_frozen = 0
        self.frozen, self.thaw = threading.Event(), threading.Event()
        self.calls: list[str] = []

    @property
    def metadata(self) -> bytes:
        return self._inner.metadata

    def register(self, regions: tuple[Region, ...], memory: str) -> None:
        self._inner.register(regions, memory)

    def add_peer(self, peer: PeerName, metadata: bytes) -> None:
        self._note("add_peer")
        self._inner.add_peer(peer, metadata)

    def remove_peer(self, peer: PeerName) -> None:
        self._note("remove_peer")
        self._inner.remove_peer(peer)

    def post_write(self, op: OpId, peer: PeerName, plan: Plan, notice: bytes) -> None:
        self._note("post_write")
        self.until_frozen -= 1
        if not self.until_frozen:
            self.frozen.set()
            assert self.thaw.wait(10.0)
        self._inner.post_write(op, peer, plan, notice)

    def post_read(self, op: OpId, peer: PeerName, plan: Plan) -> None:
        self._note("post_read")
        self._inner.post_read(op, peer, plan)

    def poll(self) -> list[TransportEvent]:
        self._note("poll")
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()

    def _note(self, call: str) -> None:
        if self.thaw.is_set():
            self.calls.append(call)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side, Freezer]]:
    fabric, made = MemoryFabric(), []

    def freezer() -> Transport:
        made.append(Freezer(fabric.transport("prefill")))
        return made[0]

    sender = Side("prefill", freezer, protocol=SHORT)
    receiver = Side("decode", lambda: fabric.transport("decode"), protocol=SHORT)
    sender.fill(seed=1)
    with running(sender, receiver):
        yield sender, receiver, made[0]
        made[0].thaw.set()


def test_sender_stopped_beyond_its_leases_gives_its_writes_up_before_anything_else(
    sides: tuple[Side, Side, Freezer],
) -> None:
    sender, receiver, freezer = sides
    first, second = new_key(), new_key()
    receiver.submit(receive(first, sender.address, TOKENS, THERE), receive(second, sender.address, TOKENS, ELSEWHERE))
    sender.submit(announce(first), announce(second))
    settle(sender, receiver)  # both are registered
    freezer.until_frozen = 2
    sender.submit(final(first, TOKENS, HERE), final(second, TOKENS, HERE))
    assert freezer.frozen.wait(10.0)
    ended = [answer(receiver, key) for key in (first, second)]
    assert all(isinstance(each, ReceiveEnded) and each.outcome is Outcome.FAILED for each in ended)
    reused_at = time.monotonic() + SHORT.lease_s + SHORT.quarantine_s
    until(lambda: time.monotonic() > reused_at)
    freezer.thaw.set()
    for key in (first, second):
        until(lambda key=key: answers(sender.drain(), key))  # type: ignore[misc]
    assert freezer.calls[0] == "remove_peer"
    for blocks in (THERE, ELSEWHERE):
        assert not any(receiver.tokens(Span(0, TOKENS), blocks))
