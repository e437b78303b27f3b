"""A sender and a receiver in virtual time, and the one request whose transfer is looked at."""

import heapq
from collections.abc import Callable
from contextlib import suppress

from kvpush.bench.faults.node import Node, Policy, Request, seed_of
from kvpush.bench.faults.wire import Wire
from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import KVPushError
from kvpush.core.events import Purpose
from kvpush.core.ids import Address, Key, TransferId
from kvpush.core.mode import Mode
from kvpush.transport.memory import MemoryFabric

TIMES = ProtocolConfig(
    lease_s=2.0,
    heartbeat_s=0.2,
    peer_timeout_s=1.0,
    connect_timeout_s=1.0,
    doubt_s=0.5,
    retry_s=0.1,
    unannounced_s=1.0,
    notice_grace_s=0.5,
    quarantine_s=2.0,
    drain_s=1.0,
    transfer_s=3.0,
    stop_s=2.0,
)
"""The protocol's times in the matrix: shorter than its defaults, in the same proportions."""

TOKENS = 30
_HALF = 16
KEPT_TOKENS = 32
"""Whole granules: what is kept is compared by these."""
_SOON_S = 60.0
_EXIT_S = 0.05
_STEP_S = 0.02
P_AT, D_AT = Address("10.0.0.1", 1), Address("10.0.0.2", 1)


class Stuck(KVPushError):
    """Something did not happen within its bound."""


class World:
    """`p` sends, `d` receives; both may be replaced by others of their name. `request` is the one in question.

    For the purpose `CONVERSATION`, `p` keeps an earlier turn, and `d` goes on from it.
    """

    def __init__(
        self,
        policy: Policy,
        mode: Mode = Mode.PUSH,
        purpose: Purpose = Purpose.PROMPT,
        times: ProtocolConfig = TIMES,
    ) -> None:
        self.now = 100.0
        self._times = times
        self.policy, self.mode, self.purpose = policy, mode, purpose
        self.wire = Wire(lambda: self.now)
        self.nodes: list[Node] = []
        self._fabric = MemoryFabric()
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._added = self._keys = 0
        self.watch: Callable[[], object] = lambda: None
        self.p, self.d = self.start("p", P_AT), self.start("d", D_AT)
        self.key = self.new_key()
        self.request: Request | None = None

    # processes ------------------------------------------------------------------------------------------
    def start(self, name: str, address: Address) -> Node:
        """Start a process."""
        node = Node(name, len(self.nodes), address, self.wire, self._fabric, self._times, self.policy, self.mode)
        self.nodes.append(node)
        return node

    @property
    def poster(self) -> Node:
        """Who moves the bytes."""
        return self.p if self.mode is Mode.PUSH else self.d

    def kill(self, node: Node) -> None:
        """kill -9."""
        node.die()
        self.wire.unplug(node.channel)

    def _let_exit(self, node: Node) -> None:
        """A process that has stopped ends when its last words have left."""
        node.has_stopped = False
        self.after(_EXIT_S, lambda: self.kill(node))

    def replace(self, node: Node) -> None:
        """Start another process at the address of a dead one."""
        fresh = self.start(node.name, node.address)
        if node is self.p:
            self.p = fresh
        else:
            self.d = fresh

    # requests -------------------------------------------------------------------------------------------
    def new_key(self) -> Key:
        """A fresh key."""
        self._keys += 1
        return Key(TransferId(f"{self._keys:032x}"))

    def begin(self, key: Key) -> Request:
        """Both engines get a request at once; the prefill takes two steps. Or the next turn of a conversation is faster
        than the last step of the one before."""
        sender = self.p
        if self.purpose is Purpose.CONVERSATION:
            sender.promise(key)
            self.after(_STEP_S, lambda: self._keep(sender, key))
            return self.d.inquire(key, KEPT_TOKENS, sender.target)
        request = self.d.receive(key, TOKENS, sender.target)
        sender.announce(key)
        self.after(_STEP_S, lambda: self._prefill(sender, key, _HALF))
        self.after(2 * _STEP_S, lambda: self._prefill(sender, key, TOKENS))
        return request

    def _prefill(self, sender: Node, key: Key, tokens: int) -> None:
        if sender.alive and sender.hung:  # its engine stands still too
            self.after(_STEP_S, lambda: self._prefill(sender, key, tokens))
        elif sender.alive:
            sender.prefill(key, seed_of(key), tokens, TOKENS)

    def _keep(self, sender: Node, key: Key) -> None:
        if sender.alive and sender.hung:
            self.after(_STEP_S, lambda: self._keep(sender, key))
        elif sender.alive:
            sender.keep(key, KEPT_TOKENS)

    def withdraw(self) -> bool:
        """The sender gives up what the request is for."""
        return (self.p.withdraw if self.purpose is Purpose.PROMPT else self.p.release)(self.key)

    # time -----------------------------------------------------------------------------------------------
    def after(self, seconds: float, happens: Callable[[], object]) -> None:
        """Let something happen later."""
        self._added += 1
        heapq.heappush(self._agenda, (self.now + seconds, self._added, happens))

    def run_until(self, holds: Callable[[], object], within_s: float, what: str) -> float:
        """Let time pass until something holds; returns how long it took. Raises `Stuck`."""
        began = self.now
        while not holds():
            when = self._next_at()
            if when > began + within_s:
                raise Stuck(f"{what}: not within {within_s:g} s")
            self._step(when)
        return self.now - began

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while (when := self._next_at()) <= until:
            self._step(when)
        self.now = until

    def settle(self, within_s: float) -> None:
        """Let time pass until nobody waits for anything, but not for ever."""
        self.run(_EXIT_S)
        with suppress(Stuck):
            self.run_until(self._is_quiet, within_s, "quiet")

    def _is_quiet(self) -> bool:
        going = [n for n in self.nodes if n.alive and not n.hung and (n.endpoint.transfers or n.sources)]
        busy = going or [n for n in self.nodes if n.flight.flying]
        return not busy and not (self._agenda and self._agenda[0][0] < self.now + _SOON_S)

    def _next_at(self) -> float:
        first = self._agenda[0][0] if self._agenda else float("inf")
        return max(self.now, min(first, *(node.due_at for node in self.nodes)))

    def _step(self, when: float) -> None:
        self.now = when
        while self._agenda and self._agenda[0][0] <= when:
            heapq.heappop(self._agenda)[2]()
            self.watch()
        for node in [node for node in self.nodes if node.due_at <= when]:
            if node.alive and not node.hung:
                node.turn()
            else:
                node.flight.land()
            if node.has_stopped:
                self._let_exit(node)
            self.watch()

    def close(self) -> None:
        """Release what the simulation needs."""
        for node in self.nodes:
            node.close()
