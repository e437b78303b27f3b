"""What vLLM carries between the two halves of the connector.

Commands ride from the scheduler's process to each rank on the metadata of a step, in the order in which they
were given, also those that its transfer thread has heard already, because the worker keeps the books of what vLLM is
owed; each rank's address comes back once, at the start.
"""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpush.core.commands import Command
from kvpush.core.ids import Address
from kvpush.vllm.step_push import NO_FINALS, StepFinals


@dataclass(frozen=True)
class StepCommands(KVConnectorMetadata):
    """What every rank's transfer thread is asked, since the last step, and what this step makes final. `heard`: for
    each command the ranks whose transfer threads have it already; none of any if left out."""

    commands: tuple[Command, ...] = ()
    finals: StepFinals = NO_FINALS
    heard: tuple[frozenset[int], ...] = ()

    def unheard(self, rank: int) -> list[Command]:
        """The commands that this rank's transfer thread does not have yet."""
        if not self.heard:
            return list(self.commands)
        pairs = zip(self.commands, self.heard, strict=True)
        return [command for command, ranks in pairs if rank not in ranks]


NO_COMMANDS = StepCommands()
"""Of the usual step, which is nobody's business but vLLM's."""


@dataclass(frozen=True)
class RankAddress(KVConnectorHandshakeMetadata):
    """Where a rank's transfer thread listens, and the file by which it is heard on its own host."""

    address: Address
    local_path: str = ""


@dataclass(frozen=True)
class RankReport(KVConnectorWorkerMetadata):
    """What a rank says of requests, by id, beyond what vLLM asks: those whose blocks it cannot call safe yet, and
    those whose blocks it now can, once per rank; those for which it is time for blocks; the first tokens that have come
    with prompts; how many tokens of an earlier turn can be had (`found`), once per rank; and those for which these have
    then not come (`lost`)."""

    kept: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    tokens: tuple[tuple[str, int], ...] = ()
    found: tuple[tuple[str, int], ...] = ()
    lost: tuple[str, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankReport":
        """The reports of two ranks as one."""
        assert isinstance(other, RankReport)
        return RankReport(
            self.kept + other.kept,
            self.released + other.released,
            self.begun + other.begun,
            self.tokens + other.tokens,
            self.found + other.found,
            self.lost + other.lost,
        )
