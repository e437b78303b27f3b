"""Endpoints joined by a simulated network and data plane, in virtual time.

Everything is real but the clock and the wires: the endpoints, their frames and the bytes that move. The
oracle checks the safety rules at each step.
"""

import heapq
from collections.abc import Callable, Iterator

from core.data_plane import DataPlane
from core.network import Judge, Network
from core.oracle import Oracle
from core.process import Process

from kvpush.core.config import ProtocolConfig
from kvpush.core.ids import Address, Key, TransferId
from kvpush.core.layout import Layout
from kvpush.core.mode import ModeSetting

CONFIG = ProtocolConfig(stop_s=5.0)


class World:
    """Time, processes, network, data plane and oracle."""

    def __init__(self, config: ProtocolConfig = CONFIG, mode: ModeSetting = ModeSetting.PUSH) -> None:
        """`mode`: of processes that have none of their own."""
        self.config = config
        self.mode = mode
        self.now = 100.0
        self.processes: list[Process] = []
        self.network = Network(self)
        self.data = DataPlane(self)
        self.oracle = Oracle(self)
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._added = 0
        self._keys = 0

    # processes ------------------------------------------------------------------------------------------
    def start(
        self,
        engine_id: str,
        layout: Layout | None = None,
        address: Address | None = None,
        mode: ModeSetting | None = None,
    ) -> Process:
        """Start a process at an address of its own, or at a given one."""
        number = len(self.processes)
        where = address or Address("10.0.0.1", 7000 + number)
        process = Process(self, number, where, engine_id, layout, mode or self.mode)
        self.processes.append(process)
        return process

    def restart(self, process: Process) -> Process:
        """Kill a process, and start another one at its address and with its engine id."""
        process.kill()
        return self.start(process.engine_id, address=process.address, mode=process.mode)

    def pair(self) -> tuple[Process, Process]:
        """A sender and a receiver."""
        return self.start("p"), self.start("d")

    def key(self) -> Key:
        """A fresh key."""
        self._keys += 1
        return Key(TransferId(f"{self._keys:032x}"))

    def keys(self, count: int) -> list[Key]:
        """Fresh keys."""
        return [self.key() for _ in range(count)]

    def hand_over(self, sender: Process, receiver: Process) -> Key:
        """A prompt of ten tokens that is asked for and complete; nothing has moved yet."""
        key = self.key()
        receiver.receive(key, sender, 10)
        sender.final(key, 10)
        return key

    def stuck_in_flight(self, sender: Process, receiver: Process) -> Key:
        """The same, once it moves; what moves now does not land before the test lets it."""
        self.data.holding = lambda _: True
        key = self.hand_over(sender, receiver)
        self.run_until(lambda: self.data.in_flight)
        return key

    def listening_at(self, address: Address) -> Process | None:
        """Who accepts connections there."""
        return next((process for process in self.living if process.address == address), None)

    @property
    def living(self) -> Iterator[Process]:
        """Processes that have not died."""
        return (process for process in self.processes if process.alive)

    def judge(self, judge: Judge) -> None:
        """Let `judge` decide the fate of frames from now on."""
        self.network.judges.append(judge)

    # time -----------------------------------------------------------------------------------------------
    def after(self, seconds: float, happens: Callable[[], object]) -> None:
        """Let something happen later."""
        self.at(self.now + seconds, happens)

    def at(self, when: float, happens: Callable[[], object]) -> None:
        """Let something happen at a time."""
        self._added += 1
        heapq.heappush(self._agenda, (when, self._added, happens))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while (when := self._next()) is not None and when <= until:
            self._step(when)
        self.now = until

    def run_until(self, holds: Callable[[], object], within: float = 5.0) -> float:
        """Let time pass until something holds; says how long it took. Fails when it takes too long."""
        began = self.now
        while not holds():
            when = self._next()
            assert when is not None, "nothing will ever happen any more"
            assert when <= began + within, f"it did not happen within {within} s"
            self._step(when)
        return self.now - began

    def settle(self, within: float = 300.0) -> float:
        """Let time pass until every transfer has ended, then check that nothing is left over."""
        took = self.run_until(self._settled, within)
        self.run(self.config.heartbeat_s)
        self.oracle.check_settled()
        return took

    def _settled(self) -> bool:
        return not self.data.in_flight and all(
            process.endpoint.transfers == 0 and not process.destinations for process in self.living
        )

    def _next(self) -> float | None:
        deadlines = [p.endpoint.next_deadline() for p in self.living if not p.hung]
        times = [self._agenda[0][0]] if self._agenda else []
        times += [max(deadline, self.now) for deadline in deadlines if deadline is not None]
        return min(times, default=None)

    def _step(self, when: float) -> None:
        self.now = when
        if self._agenda and self._agenda[0][0] <= when:
            heapq.heappop(self._agenda)[2]()
            return
        for process in list(self.living):
            deadline = process.endpoint.next_deadline()
            if deadline is not None and deadline <= when and not process.hung:
                process.tick()
