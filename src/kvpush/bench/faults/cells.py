"""One cell of the matrix: one fault at one moment under one policy, and what became of the request."""

import msgspec

from kvpush.bench.faults.kinds import KINDS, LONG_S, Moment
from kvpush.bench.faults.node import Ending, Node, Policy
from kvpush.bench.faults.wire import Fate
from kvpush.bench.faults.world import TIMES, Stuck, World
from kvpush.core.events import Purpose
from kvpush.core.mode import Mode

BOUND_S = TIMES.transfer_s + TIMES.peer_timeout_s + TIMES.connect_timeout_s
"""Every request ends within this (I3)."""
SETTLE_S = LONG_S + TIMES.lease_s + TIMES.quarantine_s + TIMES.peer_timeout_s + 2.0
"""After this nobody waits for anything."""
RECOVERY_S = 5.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`struck`: the fault has happened. `ended` is what the client saw, "died" when its engine did; `took_ms` until
    then. `leaked` counts blocks and transfers that were left, `wrong` blocks and texts with bytes of others. `problem`
    is "" when everything went on."""

    kind: str
    moment: Moment
    policy: Policy
    mode: Mode
    purpose: Purpose
    struck: bool
    ended: str
    reason: str
    took_ms: float
    leaked: int
    wrong: int
    problem: str = ""

    @property
    def survived(self) -> bool:
        """Whether the request ended, nothing was left, nothing was wrong, and the next request was served."""
        return not (self.problem or self.leaked or self.wrong)


def try_cell(
    kind: str, moment: Moment, policy: Policy, mode: Mode = Mode.PUSH, purpose: Purpose = Purpose.PROMPT
) -> Cell:
    """Let a fault strike, wait for the end, mend, and serve another request."""
    attempt = _Attempt(kind, moment, World(policy, mode, purpose))
    try:
        attempt.run()
    except (Stuck, AssertionError) as error:
        attempt.problem = str(error)
    finally:
        attempt.close()
    return attempt.verdict()


class _Attempt:
    def __init__(self, kind: str, moment: Moment, world: World) -> None:
        self._kind, self._moment, self._world = kind, moment, world
        self._has_struck = self._is_possible = False
        self._wrong = 0
        self._ended, self._reason, self._took_s = Ending.NOTHING.value, "", 0.0
        self.problem = ""

    def run(self) -> None:
        """The cell's story."""
        world = self._world
        if self._moment is not Moment.STRANGERS:
            self._serve("the first transfer")
        world.wire.sent.clear()
        world.wire.read.clear()
        world.p.flight.landed = world.d.flight.landed = 0
        self._look_at_the_request()
        self._mend()
        self._serve("the transfer after it")
        world.settle(SETTLE_S)

    def _look_at_the_request(self) -> None:
        world, receiver = self._world, self._world.d
        began, bound_s = world.now, BOUND_S + LONG_S * (self._kind == "receiver hung long")
        request = world.request = world.begin(world.key)
        if self._moment is Moment.STRANGERS:
            self._strike()
        world.watch = self._strike_when_due
        world.run_until(lambda: request.ending is not Ending.NOTHING or not self._can_end(receiver), bound_s, "the end")
        world.run_until(lambda: self._has_struck, 1.0, "the moment of the fault")
        self._ended = "died" if request.ending is Ending.NOTHING else request.ending.value
        self._reason, self._took_s = request.reason.value, max(0.0, request.ended_at - began)
        world.settle(SETTLE_S)
        if self._can_end(receiver) and not receiver.finish(request):
            self._wrong += 1
        self._wrong += self._strays()  # later requests would write over them

    def _can_end(self, receiver: Node) -> bool:
        """A dead engine ends its client's connection; a hung one does when it is found out and killed."""
        return receiver.alive and not (receiver.hung and self._kind == "receiver hung")

    def _strike_when_due(self) -> None:
        if not self._has_struck and self._moment.has_come(self._world):
            self._strike()

    def _strike(self) -> None:
        self._has_struck = True
        self._is_possible = KINDS[self._kind](self._world) is not False

    def _mend(self) -> None:
        """Whoever is dead, hung or stopped gets a successor; the network is as before."""
        world = self._world
        world.wire.fate, world.wire.refuses = (lambda _: Fate()), False
        for node in (world.p, world.d):
            if node.alive and node.hung:
                world.kill(node)
            if not node.alive:
                world.replace(node)

    def _serve(self, what: str) -> None:
        """Another request, which must be delivered."""
        world, began = self._world, self._world.now
        while True:
            request = world.begin(world.new_key())
            world.run_until(lambda r=request: r.ending is not Ending.NOTHING, RECOVERY_S, what)  # type: ignore[misc]
            world.run(0.1)
            if request.was_delivered:
                break
            world.d.finish(request)
            if world.now > began + RECOVERY_S:
                raise Stuck(f"{what}: not delivered within {RECOVERY_S:g} s, {request.reason}")
        self._wrong += not world.d.finish(request)

    def _strays(self) -> int:
        return sum(node.cache.strays() for node in self._world.nodes if node.alive)

    def close(self) -> None:
        """Release what the simulation needs."""
        self._world.close()

    def verdict(self) -> Cell:
        """What is left, and what is wrong."""
        living = [node for node in self._world.nodes if node.alive]
        left = [node.cache.held + node.endpoint.transfers + node.endpoint.ops_in_flight for node in living]
        armed = any(node.trap.armed for node in self._world.nodes)
        return Cell(
            kind=self._kind,
            moment=self._moment,
            policy=self._world.policy,
            mode=self._world.mode,
            purpose=self._world.purpose,
            struck=self._is_possible and not armed,
            ended=self._ended,
            reason=self._reason,
            took_ms=round(self._took_s * 1000, 1),
            leaked=0 if self.problem else sum(left),
            wrong=self._wrong + self._strays(),
            problem=self.problem,
        )
