"""One simulated process: an endpoint, the KV memory it serves, and an engine with a pool of blocks."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from core.memory import Memory, make_layout

from kvpush.core.commands import (
    Abort,
    Announce,
    Begin,
    Command,
    Disown,
    Expect,
    Final,
    Inquire,
    Keep,
    Promise,
    Receive,
    Release,
    Retract,
    Sampled,
    Stop,
    Watch,
    Withdraw,
)
from kvpush.core.config import ProtocolConfig
from kvpush.core.digests import Digests
from kvpush.core.effects import AddPeer, CloseLink, Effect, OpenLink, Post, PostRead, RemovePeer, SendFrame
from kvpush.core.endpoint import Endpoint
from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import (
    BlocksSafe,
    Counted,
    Ended,
    Event,
    Found,
    ModeChosen,
    Outcome,
    PeerChanged,
    PrefillBegun,
    Purpose,
    ReceiveEnded,
    SourceFree,
    Stopped,
    TransferRecord,
)
from kvpush.core.ids import Address, EngineId, Epoch, Key, PeerName, RequestId, Target
from kvpush.core.layout import Blocks, Layout, Span
from kvpush.core.mode import Mode, ModeSetting

if TYPE_CHECKING:
    from core.world import World


class Process:
    """An endpoint in its world. Dies once; a restart is another Process at the same address."""

    def __init__(
        self,
        world: "World",
        number: int,
        address: Address,
        engine_id: str,
        layout: Layout | None,
        mode: ModeSetting = ModeSetting.PUSH,
    ) -> None:
        self.world = world
        self.number = number
        self.address = address
        self.engine_id = EngineId(engine_id)
        self.layout = layout or make_layout(number)
        self.memory = Memory(self.layout)
        self.peers: dict[PeerName, Process] = {}
        self.free = list(range(self.layout.groups[0].num_blocks))
        self.destinations: dict[Key, Receive] = {}
        self.sources: dict[Key, Blocks] = {}
        self.received: dict[Key, ReceiveEnded] = {}
        self.begun: list[Key] = []
        self.quarantined: set[Key] = set()
        self.found: dict[Key, int] = {}
        self.records: list[TransferRecord] = []
        self.counted: Counter[tuple[str, Reason]] = Counter()
        self.changes: list[PeerChanged] = []
        self.choices: list[ModeChosen] = []
        self.stopped = 0
        self.alive, self.hung = True, False
        self._inbox: list[Callable[[float], None]] = []
        self.mode = mode
        epoch, metadata = Epoch(1000 + number), str(number).encode()
        self.endpoint = Endpoint(world.config, self.engine_id, epoch, self.layout, metadata, mode.modes)

    def __repr__(self) -> str:
        return f"{self.engine_id}#{self.number}"

    @property
    def config(self) -> ProtocolConfig:
        """The protocol's times."""
        return self.world.config

    @property
    def target(self) -> Target:
        """What a router would tell others of this process."""
        return Target(self.address, self.engine_id)

    @property
    def ended(self) -> tuple[Outcome, Reason]:
        """How the only transfer that was received here has ended."""
        (event,) = self.received.values()
        return event.outcome, event.reason

    def counts(self, name: str) -> int:
        """How often a counter went up, for whatever reason."""
        return sum(amount for (counter, _), amount in self.counted.items() if counter == name)

    # the engine: commands -------------------------------------------------------------------------------
    def announce(self, key: Key) -> None:
        self._execute(Announce(key, request_of(key)))

    def begin(self, key: Key) -> None:
        """The prompt has every block that it needs."""
        self._execute(Begin(key, request_of(key)))

    def final(self, key: Key, tokens: int, last: bool = True, layers: int | None = None) -> None:
        """The forward pass over the first `tokens` tokens has completed, or its first `layers` layers have."""
        if key not in self.sources:
            self.sources[key] = ()
        held = self.sources[key][0] if self.sources[key] else ()
        missing = -(-tokens // self.layout.groups[0].block_size) - len(held)
        self.sources[key] = (held + tuple(self.free.pop(0) for _ in range(missing)),)
        self.memory.fill(key, Span(0, tokens), self.sources[key], layers)
        if last:
            self.world.oracle.promise_source(self, key)
        self._execute(Final(key, request_of(key), tokens, self.sources[key], last, layers))

    def sampled(self, key: Key, token: int | None) -> None:
        self._execute(Sampled(key, request_of(key), token))

    def preempt(self, key: Key) -> None:
        """The engine needs the blocks of a prompt that is not complete, and tells only afterwards."""
        self._give_back(self.sources[key])
        self.sources[key] = ()
        self._execute(Retract(key, request_of(key)))

    def withdraw(self, key: Key, reason: Reason = Reason.PREFILL_ABORTED) -> None:
        self.world.oracle.promise_source(self, key)
        self._execute(Withdraw(key, request_of(key), reason))

    def promise(self, key: Key) -> None:
        self._execute(Promise(key))

    def keep(self, key: Key, tokens: int, digests: Digests, keep_s: float = 60.0) -> None:
        """A request has finished; what it leaves may be asked for."""
        count = -(-tokens // self.layout.groups[0].block_size)
        self.sources[key] = (tuple(self.free.pop(0) for _ in range(count)),)
        self.memory.fill(key, Span(0, tokens), self.sources[key], None)
        self.world.oracle.promise_source(self, key)
        self._execute(Keep(key, request_of(key), tokens, self.sources[key], digests, keep_s))

    def release(self, key: Key) -> None:
        self._execute(Release(key))

    def inquire(self, key: Key, sender: "Process | Target", digests: Digests) -> None:
        self._execute(Expect(key, request_of(key), _target(sender)))
        self._execute(Inquire(key, request_of(key), _target(sender), digests))

    def expect(self, key: Key, sender: "Process | Target") -> None:
        self._execute(Expect(key, request_of(key), _target(sender)))

    def watch(self, key: Key) -> None:
        self._execute(Watch(key, request_of(key)))

    def receive(
        self,
        key: Key,
        sender: "Process | Target",
        tokens: int,
        start: int = 0,
        wants_token: bool = False,
        mode: Mode | None = None,
    ) -> Receive:
        """Allocate blocks for the tokens [start, tokens) and ask for them."""
        size = self.layout.groups[0].block_size
        count = -(-tokens // size) - start // size
        blocks: Blocks = (tuple(self.free.pop(0) for _ in range(count)),)
        blocks += tuple(tuple(range(count)) for _ in self.layout.groups[1:])
        purpose = Purpose.CONVERSATION if key in self.found else Purpose.PROMPT
        span = Span(start, tokens)
        command = Receive(key, request_of(key), _target(sender), span, blocks, wants_token, purpose, mode)
        self.destinations[key] = command
        self._execute(command)
        return command

    def abort(self, key: Key, reason: Reason = Reason.ABORTED) -> None:
        self._execute(Abort(key, reason))

    def disown(self, key: Key, sender: "Process | Target") -> None:
        self._execute(Disown(key, request_of(key), _target(sender)))

    def stop(self) -> None:
        self._execute(Stop())

    def _execute(self, command: Command) -> None:
        self.input(lambda now: self.endpoint.execute(command, now))

    # faults ---------------------------------------------------------------------------------------------
    def kill(self) -> None:
        """Die at once; what is posted may still land."""
        self.alive = False
        self.world.network.cut(self)

    def hang(self) -> None:
        """SIGSTOP: nothing that happens is seen until `resume`."""
        self.hung = True

    def resume(self) -> None:
        """SIGCONT."""
        self.hung = False
        inbox, self._inbox = self._inbox, []
        for happened in inbox:
            self.input(happened)

    def tick(self) -> None:
        """A deadline has come; afterwards the next one lies ahead."""
        self.input(self.endpoint.tick)
        deadline = self.endpoint.next_deadline()
        assert deadline is None or deadline > self.world.now, f"R4: time does not lead on at {self}"

    # inputs and outputs ---------------------------------------------------------------------------------
    def input(self, happened: Callable[[float], None]) -> None:
        """Something reaches the transfer thread."""
        if not self.alive:
            return
        if self.hung:
            self._inbox.append(happened)
            return
        try:
            happened(self.world.now)
        except LocalProtocolError as error:
            self.world.oracle.refused.append(str(error))
        self._drain()
        self.world.oracle.check_deadline(self)

    def _drain(self) -> None:
        for event in self.endpoint.take_events():
            self._note(event)
        for effect in self.endpoint.take_effects():
            self._apply(effect)

    def _apply(self, effect: Effect) -> None:
        match effect:
            case SendFrame(link, frame):
                self.world.network.send(self, link, frame)
            case OpenLink(link, address):
                self.world.network.dial(self, link, address)
            case CloseLink(link):
                self.world.network.close(self, link)
            case AddPeer(name, metadata):
                self.world.data.add_peer(self, name, metadata)
            case RemovePeer(name):
                self.world.data.remove_peer(self, name)
            case Post() | PostRead():
                self.world.data.queue(self, effect)

    def _note(self, event: Event) -> None:
        match event:
            case PrefillBegun(key):
                self.begun.append(key)
            case ReceiveEnded(key):
                self.world.oracle.check_received(self, event)
                self.received[key] = event
                if event.quarantined:
                    self.quarantined.add(key)
                else:
                    self._give_back(self.destinations.pop(key).blocks)
            case BlocksSafe(key):
                self.world.oracle.check_safe(self, key)
                self.quarantined.remove(key)
                self._give_back(self.destinations.pop(key).blocks)
            case Found(key, _, tokens):
                assert key not in self.found, f"{key} is found twice"
                self.found[key] = tokens
            case SourceFree(key):
                self.world.oracle.check_source_free(self, key)
                self._give_back(self.sources.pop(key, ()))
            case Ended(record):
                self.world.oracle.check_ended(self, record)
                self.records.append(record)
            case Counted(name, reason, amount):
                self.counted[name, reason] += amount
            case PeerChanged():
                self.changes.append(event)
            case ModeChosen():
                self.choices.append(event)
            case Stopped():
                self.stopped += 1

    def _give_back(self, blocks: Blocks) -> None:
        """Blocks go to the free pool, and what they held is overwritten by whoever gets them next."""
        for ids in blocks[:1]:
            self.memory.scribble(ids)
            self.free.extend(ids)


def request_of(key: Key) -> RequestId:
    """The engine's name for the request with this key."""
    return RequestId(f"req-{key}")


def _target(sender: Process | Target) -> Target:
    return sender.target if isinstance(sender, Process) else sender
