"""One simulated process: a transfer thread's loop over a small cache, and an engine that uses it as vLLM does."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvpush.bench.faults.cache import BLOCK_SIZE, Cache
from kvpush.bench.faults.flight import FlightTransport
from kvpush.bench.faults.wire import Wire
from kvpush.core.commands import (
    Abort,
    Announce,
    Command,
    Expect,
    Final,
    Inquire,
    Keep,
    Promise,
    Receive,
    Release,
    Stop,
    Withdraw,
)
from kvpush.core.config import ProtocolConfig
from kvpush.core.digests import Digests, digests_of
from kvpush.core.endpoint import Endpoint
from kvpush.core.errors import Reason
from kvpush.core.events import BlocksSafe, Event, Found, Outcome, Purpose, ReceiveEnded, SourceFree, Stopped
from kvpush.core.ids import Address, EngineId, Epoch, Key, RequestId, Target
from kvpush.core.layout import Span
from kvpush.core.mode import Mode
from kvpush.runtime.driver import Driver
from kvpush.runtime.mailbox import Mailbox
from kvpush.transport.faults import Fault, Point
from kvpush.transport.faulty import FaultyTransport
from kvpush.transport.memory import MemoryFabric

_POLL_S = 0.001
_KEEP_S = 2.0
_SOONEST_S = 1e-6
"""The next turn is never at the same moment: a deadline is a sum of floats."""


class Policy(StrEnum):
    """vLLM's `kv_load_failure_policy`."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class Ending(StrEnum):
    """What the client of a request sees."""

    NOTHING = "nothing"
    TEXT = "text"
    ERROR = "error"


@dataclass
class Request:
    """One prompt at its receiver. `late` are blocks that it has left and that a late write may still reach.

    Received from `sender` for `purpose`; an earlier turn is asked for first, and computed when it does not come.
    """

    key: Key
    tokens: int
    sender: Target
    purpose: Purpose = Purpose.PROMPT
    blocks: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    ending: Ending = Ending.NOTHING
    ended_at: float = 0.0
    reason: Reason = Reason.OK

    @property
    def was_delivered(self) -> bool:
        """Whether its text was made from what the sender had."""
        return self.ending is Ending.TEXT and self.reason is Reason.OK


class Trap:
    """A `Faults` that waits: once `armed`, the fault befalls the next occurrence of its point."""

    def __init__(self) -> None:
        self.armed: Fault | None = None

    def at(self, point: Point) -> Fault | None:
        """The fault, once."""
        if self.armed is None or self.armed.kind.point is not point:
            return None
        fault, self.armed = self.armed, None
        return fault


class Node:
    """A process. It dies once; another one may then be started at its address."""

    def __init__(
        self,
        name: str,
        life: int,
        address: Address,
        wire: Wire,
        fabric: MemoryFabric,
        config: ProtocolConfig,
        policy: Policy = Policy.FAIL,
        mode: Mode = Mode.PUSH,
    ) -> None:
        self.name, self.address, self.policy = name, address, policy
        self.cache, self.trap = Cache(), Trap()
        self.alive, self.hung, self.has_stopped, self.wake_at = True, False, False, 0.0
        self.pause_s, self._turned_at = 0.0, float("-inf")
        self.requests: dict[Key, Request] = {}
        self.sources: dict[Key, tuple[int, ...]] = {}
        self._over: set[Key] = set()
        self._clock: Callable[[], float] = wire.clock
        self._mailbox = Mailbox()
        self.flight = FlightTransport(fabric.transport(f"{name}#{life}"), wire.clock)
        self.flight.register(self.cache.layout.regions, "dram")
        self.transport = FaultyTransport(self.flight, self.trap)
        self.epoch = Epoch(life + 1)
        layout, metadata = self.cache.layout, self.transport.metadata
        self.endpoint = Endpoint(config, EngineId(name), self.epoch, layout, metadata, (mode,))
        self.channel = wire.listen(address)
        self._driver = Driver(
            self.endpoint,
            self.transport,
            self.channel,
            self._mailbox,
            poll_s=_POLL_S,
            stop_s=config.stop_s,
            clock=wire.clock,
        )

    @property
    def target(self) -> Target:
        """What a router would say of it."""
        return Target(self.address, EngineId(self.name))

    # life ---------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """One turn of the transfer thread, and the engine's next step."""
        self._turned_at = self._clock()
        self._driver.turn()
        for event in self._mailbox.drain():
            self._note(event)
        wait_s = self._driver.wait_s()
        self.wake_at = float("inf") if wait_s is None else self._clock() + max(wait_s, _SOONEST_S)

    @property
    def due_at(self) -> float:
        """When it next has something to do. A process that is short of CPU has `pause_s` between two turns."""
        if self.alive and not self.hung:
            due_at = min(self.wake_at, self.channel.next_at, self.flight.next_at)
            return max(due_at, self._turned_at + self.pause_s)
        return self.flight.next_at

    def die(self) -> None:
        """At once. What it has posted may still land; nothing lands in it."""
        self.alive = False
        if not self.flight.flying:
            self.flight.close()

    def resume(self) -> None:
        """SIGCONT."""
        self.hung, self.wake_at = False, self._clock()

    def close(self) -> None:
        """Release what the simulation needs."""
        self._mailbox.close()

    def _submit(self, command: Command) -> None:
        self._mailbox.submit([command])
        self.wake_at = self._clock()

    # the sender's engine ------------------------------------------------------------------------------
    def announce(self, key: Key) -> None:
        """A prompt has been queued."""
        self._submit(Announce(key, _request(key)))

    def prefill(self, key: Key, seed: int, tokens: int, whole: int) -> None:
        """A step has computed the first `tokens` of `whole` tokens."""
        if key in self._over:
            return
        if tokens == whole:
            self._over.add(key)
        blocks = self.sources.get(key) or self.cache.take(-(-whole // BLOCK_SIZE))
        self.sources[key] = blocks
        self.cache.compute(seed, tokens, blocks)
        used = blocks[: -(-tokens // BLOCK_SIZE)]
        self._submit(Final(key, _request(key), tokens, (used,), last=tokens == whole))

    def withdraw(self, key: Key) -> bool:
        """The prompt is aborted here, unless it has been computed."""
        if key in self._over:
            return False
        self._over.add(key)
        self.sources.setdefault(key, ())
        self._submit(Withdraw(key, _request(key), Reason.PREFILL_ABORTED))
        return True

    # the sender's engine, for conversations -------------------------------------------------------------
    def promise(self, key: Key) -> None:
        """A request runs that is to be kept."""
        self._submit(Promise(key))

    def keep(self, key: Key, tokens: int) -> None:
        """A request has finished, and its blocks are kept."""
        if key in self._over:
            return
        blocks = self.sources[key] = self.cache.take(-(-tokens // BLOCK_SIZE))
        self.cache.compute(seed_of(key), tokens, blocks)
        self._submit(Keep(key, _request(key), tokens, (blocks,), _digests(key, tokens), _KEEP_S))

    def release(self, key: Key) -> bool:
        """The blocks of what is kept, or will be, are needed for others."""
        self._over.add(key)
        self._submit(Release(key))
        return True

    # the receiver's engine ----------------------------------------------------------------------------
    def receive(self, key: Key, tokens: int, sender: Target) -> Request:
        """A request has come and has got its blocks."""
        request = self.requests[key] = Request(key, tokens, sender)
        self._receive(request)
        return request

    def inquire(self, key: Key, tokens: int, sender: Target) -> Request:
        """A request has come that goes on from one that the sender keeps."""
        request = self.requests[key] = Request(key, tokens, sender, Purpose.CONVERSATION)
        self._submit(Expect(key, _request(key), sender))
        self._submit(Inquire(key, _request(key), sender, _digests(key, tokens)))
        return request

    def _receive(self, request: Request) -> None:
        key, span = request.key, Span(0, request.tokens)
        request.blocks = self.cache.take(-(-request.tokens // BLOCK_SIZE))
        blocks = (request.blocks,)
        self._submit(Receive(key, _request(key), request.sender, span, blocks, purpose=request.purpose))

    def abort(self, key: Key) -> None:
        """The client has gone."""
        self._submit(Abort(key))
        request = self.requests[key]
        if request.purpose is Purpose.CONVERSATION and not request.blocks and request.ending is Ending.NOTHING:
            self._end(request, Ending.ERROR, Reason.ABORTED)  # it waits for nothing that could be reported

    def stop(self) -> None:
        """SIGTERM."""
        self._submit(Stop())

    # what the transfer thread says ----------------------------------------------------------------------
    def _note(self, event: Event) -> None:
        match event:
            case SourceFree(key):
                self.cache.give_back(self.sources.pop(key))
            case Found(key, tokens=tokens):
                self._found(self.requests[key], tokens)
            case ReceiveEnded(key):
                self._received(self.requests[key], event)
            case BlocksSafe(key):
                request = self.requests[key]
                late, request.late = request.late, ()
                self.cache.give_back(late)
            case Stopped():
                self.has_stopped = True
            case _:
                pass

    def _found(self, request: Request, tokens: int) -> None:
        if request.ending is not Ending.NOTHING:
            return
        if tokens == request.tokens:
            self._receive(request)
        else:
            self._submit(Abort(request.key, Reason.NOT_NEEDED))
            self._end(request, Ending.TEXT, Reason.UNKNOWN_TRANSFER)
            self._compute(request)

    def _end(self, request: Request, ending: Ending, reason: Reason) -> None:
        assert request.ending is Ending.NOTHING, f"{request.key} has ended twice"
        request.ending, request.reason, request.ended_at = ending, reason, self._clock()

    def _received(self, request: Request, ended: ReceiveEnded) -> None:
        if ended.outcome is Outcome.DELIVERED:
            self._end(request, Ending.TEXT, ended.reason)
            return
        if ended.quarantined:
            request.late = request.blocks
        else:
            self.cache.give_back(request.blocks)
        request.blocks = ()
        fails = self.policy is Policy.FAIL and request.purpose is Purpose.PROMPT
        if fails or ended.reason is Reason.ABORTED:
            self._end(request, Ending.ERROR, ended.reason)
            return
        self._end(request, Ending.TEXT, ended.reason)
        self._compute(request)

    def _compute(self, request: Request) -> None:
        # in another order than before: a late write must not happen to bring the right bytes
        request.blocks = self.cache.take(-(-request.tokens // BLOCK_SIZE))[::-1]
        self.cache.compute(seed_of(request.key), request.tokens, request.blocks)

    def finish(self, request: Request) -> bool:
        """The request leaves; says whether its blocks hold what its text was made from."""
        blocks, request.blocks = request.blocks, ()
        right = request.ending is not Ending.TEXT or self.cache.holds(seed_of(request.key), request.tokens, blocks)
        self.cache.give_back(blocks)
        return right


def seed_of(key: Key) -> int:
    """Which prompt a key is about."""
    return int(key.transfer_id, 16)


def _digests(key: Key, tokens: int) -> Digests:
    return digests_of(range(seed_of(key), seed_of(key) + tokens))


def _request(key: Key) -> RequestId:
    return RequestId(f"request-{key}")
