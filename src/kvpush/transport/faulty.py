"""Any transport, with faults. Faults of writes are the sender's, faults of notices and reads the receiver's: wrap
that side."""

from dataclasses import dataclass, replace

from kvpush.core.errors import TransportError
from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import Region
from kvpush.core.planner import Plan
from kvpush.transport.base import NoticeArrived, OpDone, Transport, TransportEvent
from kvpush.transport.faults import Fault, FaultKind, Faults, Point


@dataclass(frozen=True, eq=False)
class _Held:
    """An operation that the transport beneath has not been told of; `due` None is never, `notice` None a read."""

    due: int | None
    op: OpId
    peer: PeerName
    plan: Plan
    notice: bytes | None

    def post(self, transport: Transport) -> None:
        if self.notice is None:
            transport.post_read(self.op, self.peer, self.plan)
        else:
            transport.post_write(self.op, self.peer, self.plan, self.notice)


@dataclass(frozen=True)
class _Late:
    """An event that is to be reported at poll number `due`."""

    due: int
    event: TransportEvent


class FaultyTransport:
    """A `Transport`. `injected` lists the faults so far, in order."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.injected: list[Fault] = []
        self._inner = inner
        self._faults = faults
        self._polls = 0
        self._held: list[_Held] = []
        self._late: list[_Late] = []
        self._spoilt: dict[OpId, Fault] = {}

    @property
    def metadata(self) -> bytes:
        """The inner transport's."""
        return self._inner.metadata

    def register(self, regions: tuple[Region, ...], memory: str) -> None:
        """Never goes wrong here."""
        self._inner.register(regions, memory)

    def add_peer(self, peer: PeerName, metadata: bytes) -> None:
        """May fail."""
        if self._draw(Point.ADD_PEER) is not None:
            raise TransportError(f"injected: {peer} cannot be loaded")
        self._inner.add_peer(peer, metadata)

    def remove_peer(self, peer: PeerName) -> None:
        """Also ends the writes that are held back."""
        dropped = [held for held in self._held if held.peer == peer]
        self._held = [held for held in self._held if held.peer != peer]
        self._late.extend(_Late(0, OpDone(held.op, f"peer {peer} was removed")) for held in dropped)
        self._inner.remove_peer(peer)

    def post_write(self, op: OpId, peer: PeerName, plan: Plan, notice: bytes) -> None:
        """May raise, do half of it, or do it at another time."""
        self._post(self._draw(Point.WRITE), _Held(None, op, peer, plan, notice))

    def post_read(self, op: OpId, peer: PeerName, plan: Plan) -> None:
        """The same of a read."""
        self._post(self._draw(Point.READ), _Held(None, op, peer, plan, None))

    def poll(self) -> list[TransportEvent]:
        """What the inner transport reports, but for faults, and what was kept back for now."""
        self._polls += 1
        self._post_due()
        events = [after for event in self._inner.poll() for after in self._after_faults(event)]
        due = [late.event for late in self._late if late.due <= self._polls]
        self._late = [late for late in self._late if late.due > self._polls]
        return due + events

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()

    def _draw(self, point: Point) -> Fault | None:
        fault = self._faults.at(point)
        if fault is not None:
            self.injected.append(fault)
        return fault

    def _post(self, fault: Fault | None, asked: _Held) -> None:
        if fault is None:
            asked.post(self._inner)
            return
        due = self._polls + fault.polls
        match fault.kind:
            case FaultKind.POST_RAISES | FaultKind.READ_RAISES:
                raise TransportError("injected: it cannot be posted")
            case FaultKind.WRITE_FAILS | FaultKind.READ_FAILS:
                self._late.append(_Late(due, OpDone(asked.op, "injected: it failed")))
            case FaultKind.WRITE_LATE | FaultKind.READ_LATE:
                self._held.append(replace(asked, due=due))
            case FaultKind.WRITE_STUCK | FaultKind.READ_STUCK:
                self._held.append(asked)
            case FaultKind.WRITE_TORN | FaultKind.READ_TORN:
                notice = None if asked.notice is None else b""
                replace(asked, plan=_first_half(asked.plan), notice=notice).post(self._inner)
                self._spoilt[asked.op] = fault
            case _:
                asked.post(self._inner)
                self._spoilt[asked.op] = fault

    def _post_due(self) -> None:
        due = [held for held in self._held if held.due is not None and held.due <= self._polls]
        self._held = [held for held in self._held if held not in due]
        for held in due:
            try:
                held.post(self._inner)
            except TransportError as error:
                self._late.append(_Late(self._polls, OpDone(held.op, str(error))))

    def _after_faults(self, event: TransportEvent) -> list[TransportEvent]:
        """What becomes of an event of the inner transport now."""
        if isinstance(event, NoticeArrived):
            return self._notice(event)
        fault = self._spoilt.pop(event.op, None)
        if fault is None:
            return [event]
        if fault.kind in (FaultKind.WRITE_TORN, FaultKind.READ_TORN):
            return [OpDone(event.op, event.error or "injected: it failed half way")]
        self._late.append(_Late(self._polls + fault.polls, event))
        return []

    def _notice(self, event: NoticeArrived) -> list[TransportEvent]:
        fault = self._draw(Point.NOTICE)
        if fault is None:
            return [event]
        if fault.kind is not FaultKind.NOTICE_LOST:
            self._late.append(_Late(self._polls + fault.polls, event))
        return [event] if fault.kind is FaultKind.NOTICE_TWICE else []


def _first_half(plan: Plan) -> Plan:
    half = slice(0, (plan.descriptors + 1) // 2)
    # of a single descriptor half the bytes
    nbytes = plan.nbytes[half] if plan.descriptors > 1 else (plan.nbytes + 1) // 2
    return Plan(plan.local[half], plan.remote[half], nbytes)
