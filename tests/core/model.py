"""A small world in which everything that can happen is a choice: what the model check explores.

One sender and one receiver, both real endpoints. Frames keep their order within a connection; those of a broken
connection may still be read by the side that accepted it. A write lands, with its notice, at any time until the
transport gives it up. Time passes from deadline to deadline. Faults are limited by a budget, else there is no end.
"""

from collections.abc import Iterator
from copy import copy as shallow
from dataclasses import dataclass, field

from core.bounds import CONFIG, TRANSPORT_S, Bounds
from core.memory import make_layout
from core.snapshot import Print, ago, copy, fingerprint, print_frame, without

from kvpush.core.commands import Abort, Command, Final, Receive, Withdraw
from kvpush.core.effects import AddPeer, CloseLink, Effect, OpenLink, Post, RemovePeer, SendFrame
from kvpush.core.endpoint import Endpoint
from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import BlocksSafe, Event, Outcome, ReceiveEnded, SourceFree
from kvpush.core.ids import Address, EngineId, Epoch, Key, LinkId, OpId, RequestId, Target
from kvpush.core.layout import Span
from kvpush.core.messages import decode_notice

P, D = "p", "d"
TARGET = Target(Address("p", 1), EngineId("p"))
_LAYOUTS = {P: make_layout(0, 4, 16), D: make_layout(1, 4, 16)}

Action = tuple[str, ...]


@dataclass(frozen=True)
class Writing:
    """A write in flight, from one life of the sender to one life of the receiver."""

    op: OpId
    key: Key
    lives: tuple[Epoch, Epoch]
    notice: bytes
    nbytes: int
    posted_at: float


@dataclass
class Model:
    """One state. `step` gives another one and leaves this as it is: what they have in common is shared."""

    bounds: Bounds
    now: float = 100.0
    ends: dict[str, Endpoint] = field(default_factory=dict)
    epochs: dict[str, Epoch] = field(default_factory=lambda: {P: Epoch(1), D: Epoch(1001)})
    link: LinkId = LinkId(1)  # noqa: RUF009
    connection: int = 1
    up: tuple[tuple[int, bytes], ...] = ()
    down: tuple[bytes, ...] = ()
    writes: tuple[Writing, ...] = ()
    notices: tuple[bytes, ...] = ()
    landed: dict[Key, int] = field(default_factory=dict)
    receiving: frozenset[Key] = frozenset()
    unsafe: frozenset[Key] = frozenset()
    owed: frozenset[Key] = frozenset()
    sources: frozenset[Key] = frozenset()
    done: frozenset[Action] = frozenset()
    faults: int = 0
    hung: bool = False
    printed: dict[str, tuple[Endpoint, float, Print]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ends = {who: self._endpoint(who) for who in (P, D)}

    def _endpoint(self, who: str) -> Endpoint:
        return Endpoint(CONFIG, EngineId(who), self.epochs[who], _LAYOUTS[who], b"")

    # what can happen ------------------------------------------------------------------------------------
    def choices(self) -> Iterator[Action]:
        """All that may happen next."""
        yield from self._by_engines()
        yield from (("up", str(c)) for c in self._readable())
        if self.down:
            yield ("down",)
        yield from (("land", str(i)) for i in range(len(self.writes)))
        yield from (("notice", str(i)) for i in range(len(self.notices)))
        if self.hung:
            yield ("wake p",)
        if not self.down and not self._readable():
            yield ("time",)
        if self.faults < self.bounds.faults:
            yield from (action for action in self._faults() if " ".join(action).startswith(self.bounds.kinds))

    def _by_engines(self) -> Iterator[Action]:
        for i, key in enumerate(self.bounds.keys):
            for blocks in range(1, self.bounds.blocks + 1):
                if not self.hung and (blocks == 1 or ("final", str(i), str(blocks - 1)) in self.done):
                    yield from self._once("final", str(i), str(blocks))
            if not (self.bounds.is_symmetric and i) or ("receive", str(i - 1)) in self.done:
                yield from self._once("receive", str(i))
            if i >= self.bounds.transfers - self.bounds.plain:
                continue
            if not self.hung and ("final", str(i), str(self.bounds.blocks)) not in self.done:
                yield from self._once("withdraw", str(i))
            if key in self.receiving:
                yield from self._once("abort", str(i))

    def _once(self, *action: str) -> Iterator[Action]:
        withdrawn = action[0] == "final" and ("withdraw", action[1]) in self.done
        if action not in self.done and not withdrawn:
            yield action

    def _readable(self) -> list[int]:
        return [] if self.hung else list(dict.fromkeys(connection for connection, _ in self.up))

    def _faults(self) -> Iterator[Action]:
        for connection in self._readable():
            yield from (("lose up", str(connection)), ("double up", str(connection)))
        if self.down:
            yield from (("lose down",), ("double down",))
        if self.down or self._readable():
            yield ("late",)
        yield from (("fail", str(i)) for i in range(len(self.writes)))
        yield from (("unnoticed", str(i)) for i in range(len(self.notices)))
        yield from (("break",), ("crash p",), ("crash d",))
        if not self.hung:
            yield ("hang p",)

    # what happens ---------------------------------------------------------------------------------------
    def step(self, action: Action) -> "Model":
        """The state after `action`. Raises AssertionError when a rule is broken."""
        after = shallow(self)
        after.ends = dict(self.ends)
        kind, *rest = action
        match kind.split():
            case ["final" | "withdraw" | "receive" | "abort"]:
                after.done = self.done | {action}
                after._command(kind, int(rest[0]), rest[1:])
            case ["up"]:
                after._read_up(int(rest[0]))
            case ["down"]:
                after._read_down()
            case ["land" | "fail"]:
                after._finish(int(rest[0]), "" if kind == "land" else "broken")
            case ["notice"]:
                after._notice(int(rest[0]))
            case ["time"]:
                after._pass_time()
            case ["wake", _]:
                after._wake()
            case _:
                after.faults += 1
                after._suffer(action)
        after._check()
        return after

    def _suffer(self, action: Action) -> None:
        kind, *rest = action
        match kind:
            case "late":
                self._pass_time()
            case "lose up":
                self._take_up(int(rest[0]))
            case "lose down":
                self.down = self.down[1:]
            case "double up":
                frame = self._take_up(int(rest[0]))
                self.up = ((int(rest[0]), frame), *self.up)
                self._read_up(int(rest[0]))
            case "double down":
                self.down = (self.down[0], *self.down)
                self._read_down()
            case "fail":
                self._finish(int(rest[0]), "broken")
            case "unnoticed":
                self.notices = without(self.notices, int(rest[0]))
            case "break":
                self._break()
            case "hang p":
                self.hung = True
            case "crash p" | "crash d":
                self._crash(kind[-1])

    def _command(self, kind: str, number: int, rest: list[str]) -> None:
        key = self.bounds.keys[number]
        request, tokens = RequestId(f"r{number}"), 4 * self.bounds.blocks
        base = number * self.bounds.blocks
        match kind:
            case "receive":
                self.receiving |= {key}
                ids = tuple(range(base, base + self.bounds.blocks))
                self.execute(D, Receive(key, request, TARGET, Span(0, tokens), (ids,)))
            case "abort":
                self.execute(D, Abort(key))
            case "withdraw":
                self.owed |= {key}
                self.execute(P, Withdraw(key, request, Reason.PREFILL_ABORTED))
            case _:
                count = int(rest[0])
                self.sources |= {key}
                if is_last := count == self.bounds.blocks:
                    self.owed |= {key}
                ids = tuple(range(base, base + count))
                self.execute(P, Final(key, request, 4 * count, (ids,), is_last))

    def execute(self, who: str, command: Command) -> None:
        """An engine's command, in place."""
        end = self._own(who)
        try:
            end.execute(command, self.now)
        except LocalProtocolError as error:
            raise AssertionError(f"the engine broke a rule: {error}") from None
        self._drain(who)

    def _read_up(self, connection: int) -> None:
        frame = self._take_up(connection)
        self._own(P).frame_received(LinkId(-connection), frame, self.now)
        self._drain(P)

    def _take_up(self, connection: int) -> bytes:
        index = next(i for i, (c, _) in enumerate(self.up) if c == connection)
        frame = self.up[index][1]
        self.up = without(self.up, index)
        return frame

    def _read_down(self) -> None:
        frame, self.down = self.down[0], self.down[1:]
        self._own(D).frame_received(self.link, frame, self.now)
        self._drain(D)

    def _finish(self, index: int, error: str) -> None:
        write = self.writes[index]
        self.writes = without(self.writes, index)
        sender, receiver = write.lives
        if receiver == self.epochs[D] and not error:
            assert write.key in self.receiving, f"R1: {write.key} is written after its blocks went back"
            self.landed = {**self.landed, write.key: self.landed.get(write.key, 0) + write.nbytes}
            self.notices = (*self.notices, write.notice)
        if sender == self.epochs[P]:
            self._own(P).op_finished(write.op, error or ("" if receiver == self.epochs[D] else "gone"), self.now)
            self._drain(P)

    def _notice(self, index: int) -> None:
        notice = self.notices[index]
        self.notices = without(self.notices, index)
        self._own(D).notice_received(notice, self.now)
        self._drain(D)

    def _pass_time(self) -> None:
        deadlines = [self.ends[who].next_deadline() for who in self._awake()]
        times = [t for t in deadlines if t is not None] + [w.posted_at + TRANSPORT_S for w in self.writes]
        if not times:
            return
        self.now = max(self.now, min(times))
        for write in [w for w in self.writes if w.posted_at + TRANSPORT_S <= self.now]:
            self._finish(self.writes.index(write), "given up")
        for who in self._awake():
            due = self.ends[who].next_deadline()
            if due is not None and due <= self.now:
                self._tick(who)

    def _wake(self) -> None:
        """The sender goes on, and reads all that has waited for it."""
        self.hung = False
        self._tick(P)
        for connection in list(self.up):
            self._read_up(connection[0])

    def _awake(self) -> tuple[str, ...]:
        return (D,) if self.hung else (P, D)

    def _tick(self, who: str) -> None:
        end = self._own(who)
        end.tick(self.now)
        self._drain(who)
        deadline = end.next_deadline()
        assert deadline is None or deadline > self.now, "R4: time does not lead on"

    def _break(self) -> None:
        self._own(P).link_lost(LinkId(-self.connection), self.now)
        self._drain(P)
        self.connection += 1
        self.down = ()
        self._own(D).link_lost(self.link, self.now)
        self._drain(D)

    def _crash(self, who: str) -> None:
        self.epochs = {**self.epochs, who: Epoch(self.epochs[who] + 1)}
        self.ends[who] = self._endpoint(who)
        if who == P:
            self.sources = self.owed = frozenset()
            self.hung = False
            self.done |= {action for action in self._by_engines() if action[0] in ("final", "withdraw")}
            self._break()
        else:
            self.receiving, self.landed, self.notices = frozenset(), {}, ()
            self.unsafe = frozenset()
            self._own(P).link_lost(LinkId(-self.connection), self.now)
            self._drain(P)
            self.done |= {("receive", str(i)) for i in range(self.bounds.transfers)}
            self.connection += 1
            self.down = ()

    # effects and events ---------------------------------------------------------------------------------
    def _own(self, who: str) -> Endpoint:
        """An endpoint that is this state's alone, to be changed."""
        self.ends[who] = copy(self.ends[who])
        return self.ends[who]

    def _drain(self, who: str) -> None:
        end = self.ends[who]
        while True:
            events, effects = end.take_events(), end.take_effects()
            for event in events:
                self._note(event)
            for effect in effects:
                self._apply(who, end, effect)
            if not effects:
                return

    def _apply(self, who: str, end: Endpoint, effect: Effect) -> None:
        match effect:
            case SendFrame(link, frame) if who == D:
                self.up = (*self.up, (self.connection, frame))
            case SendFrame(link, frame) if link == -self.connection:
                self.down = (*self.down, frame)
            case OpenLink(link):
                self.link = link
                self.connection += 1
                self.down = ()
            case AddPeer(name):
                end.peer_added(name, "", self.now)
            case RemovePeer(name):
                self._remove(end, name)
            case Post():
                self._post(effect)
            case SendFrame() | CloseLink():
                pass

    def _post(self, post: Post) -> None:
        notice = decode_notice(post.notice)
        assert notice.key in self.sources, f"R2: {notice.key} is posted, but its source is gone"
        lives = (self.epochs[P], notice.destination)
        write = Writing(post.op, notice.key, lives, post.notice, post.plan.total_bytes, self.now)
        self.writes = (*self.writes, write)

    def _remove(self, end: Endpoint, name: str) -> None:
        life = int(name.split("@")[1], 16)
        for write in [w for w in self.writes if w.lives == (self.epochs[P], life)]:
            self.writes = without(self.writes, self.writes.index(write))
            end.op_finished(write.op, "removed", self.now)

    def _note(self, event: Event) -> None:
        if isinstance(event, ReceiveEnded):
            assert event.key in self.receiving - self.unsafe, f"R3: {event.key} is received twice"
            nbytes = 4 * self.bounds.blocks * _LAYOUTS[D].token_bytes
            if event.outcome is Outcome.DELIVERED:
                assert self.landed.get(event.key) == nbytes, f"R6: {event.key} is not all there"
            if event.quarantined:
                self.unsafe |= {event.key}
            else:
                self.receiving -= {event.key}
        elif isinstance(event, BlocksSafe):
            assert event.key in self.unsafe, f"R3: {event.key} is in no quarantine"
            self.unsafe -= {event.key}
            self.receiving -= {event.key}
        elif isinstance(event, SourceFree):
            assert event.key in self.owed, f"R3: the source of {event.key} is freed twice"
            reading = [w for w in self.writes if w.key == event.key and w.lives[0] == self.epochs[P]]
            assert not reading, f"R2: the source of {event.key} is freed while a write reads it"
            self.owed -= {event.key}
            self.sources -= {event.key}

    def _check(self) -> None:
        assert not self.receiving or self.ends[D].next_deadline() is not None, "R4: the receiver waits for ever"

    # what it is -----------------------------------------------------------------------------------------
    @property
    def over(self) -> bool:
        """Whether nothing is going on any more."""
        busy = self.writes or self.notices or self.receiving or self.owed or self.hung
        return not busy and not any(end.transfers for end in self.ends.values())

    def fingerprint(self) -> Print:
        """States with the same fingerprint have the same future."""
        newest = self.connection
        return (
            tuple(self._print(who) for who in self.ends),
            tuple((c - newest, print_frame(f, self.now)) for c, f in self.up),
            tuple(print_frame(f, self.now) for f in self.down),
            tuple((w.key, w.lives, decode_notice(w.notice).part, ago(w.posted_at, self.now)) for w in self.writes),
            (self.notices, tuple(sorted(self.landed.items())), self.receiving, self.unsafe, self.owed, self.sources),
            (self.done, self.faults, self.hung),
        )

    def _print(self, who: str) -> Print:
        """An endpoint's fingerprint, which most steps leave as it was for one of the two."""
        end = self.ends[who]
        known = self.printed.get(who)
        if known is None or known[0] is not end or known[1] != self.now:
            known = end, self.now, fingerprint(end, self.now)
            self.printed = {**self.printed, who: known}
        return known[2]
