"""The safety rules, checked at each step of a simulated world, whatever a test is about."""

from collections import Counter
from typing import TYPE_CHECKING

from core.data_plane import Write

from kvpush.core.events import Outcome, ReceiveEnded, Role, TransferRecord
from kvpush.core.ids import Key

if TYPE_CHECKING:
    from core.process import Process
    from core.world import World


class Oracle:
    """Sees everything; asserts R1, R2, R3, R4 and R6."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._owed_sources: Counter[tuple[Process, Key]] = Counter()
        self._outcomes: set[tuple[Process, Role, Key]] = set()
        self.refused: list[str] = []
        self.landings = 0

    # R1: destination pin --------------------------------------------------------------------------------
    def check_landing(self, write: Write) -> None:
        """Bytes land only in blocks that the receiver's engine has set aside for this very transfer."""
        self.landings += 1
        command = write.destination.destinations.get(write.key)
        assert command is not None, f"R1: a write of {write.key} lands after its blocks went back to the pool"
        assert write.blocks <= set(command.blocks[0]), f"R1: a write of {write.key} lands in blocks of others"

    # R2: source pin -------------------------------------------------------------------------------------
    def check_post(self, write: Write) -> None:
        """Nothing is posted from blocks that our engine has got back."""
        assert write.key in write.source.sources, f"R2: {write.key} is posted, but its source is gone"

    def promise_source(self, process: "Process", key: Key) -> None:
        """The engine waits for one SourceFree."""
        self._owed_sources[process, key] += 1

    def check_source_free(self, process: "Process", key: Key) -> None:
        """The source is given back once, and not while a write reads it."""
        reading = [w for w in self._world.data.in_flight if w.poster is w.source is process and w.key == key]
        assert not reading, f"R2: the source of {key} is given back while a write reads it"
        self._owed_sources[process, key] -= 1
        assert self._owed_sources[process, key] >= 0, f"R3: SourceFree of {key} was not asked for"

    # R3: one outcome, R6: never wrong text --------------------------------------------------------------
    def check_received(self, process: "Process", ended: ReceiveEnded) -> None:
        """Each Receive is answered once, and DELIVERED means that every byte is there."""
        command = process.destinations.get(ended.key)
        assert command is not None, f"R3: ReceiveEnded of {ended.key}, which nobody waits for"
        assert ended.key not in process.quarantined, f"R3: {ended.key} has ended before"
        if ended.outcome is Outcome.DELIVERED:
            assert not ended.quarantined, f"R1: {ended.key} is delivered, but may still be written"
            assert process.memory.holds(ended.key, command.span, command.blocks), f"R6: {ended.key} is not all there"

    def check_safe(self, process: "Process", key: Key) -> None:
        """Quarantined blocks are let go once."""
        assert key in process.quarantined, f"R3: BlocksSafe of {key}, which is in no quarantine"

    def check_ended(self, process: "Process", record: TransferRecord) -> None:
        """One outcome per side."""
        ending = (process, record.role, record.key)
        assert ending not in self._outcomes, f"R3: {record.key} has ended twice at {process} as {record.role}"
        self._outcomes.add(ending)

    # R4: a deadline in every state ----------------------------------------------------------------------
    def check_deadline(self, process: "Process") -> None:
        """A deadline exists while the engine waits for a peer; for a write in flight the transport answers."""
        reading = any(w.source is process and not w.is_reported for w in self._world.data.writes)
        owed = any(n for (owner, _), n in self._owed_sources.items() if owner is process)
        if process.destinations or (owed and not reading):
            assert process.endpoint.next_deadline() is not None, f"R4: {process} waits for ever"

    def check_settled(self) -> None:
        """At the end: nothing is owed, nothing is held."""
        for process in self._world.living:
            assert not process.destinations, f"R4: {process} still receives {list(process.destinations)}"
            assert process.endpoint.transfers == 0, f"R4: {process} still has transfers"
            assert process.endpoint.ops_in_flight == 0
            assert process.endpoint.notices_due == 0
        owed = [(process, key) for (process, key), n in self._owed_sources.items() if n and process.alive]
        assert not owed, f"R3: SourceFree is missing for {owed}"
