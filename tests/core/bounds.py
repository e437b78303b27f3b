"""How large the world of the model check is: its times, its faults, and how much may happen in it."""

from dataclasses import dataclass

import pytest

from kvpush.core.config import ProtocolConfig
from kvpush.core.ids import Key, TransferId
from kvpush.core.mode import Mode

CONFIG = ProtocolConfig(
    lease_s=8,
    heartbeat_s=2,
    peer_timeout_s=6,
    connect_timeout_s=4,
    retry_s=2,
    unannounced_s=4,
    notice_grace_s=2,
    quarantine_s=4,
    drain_s=4,
    transfer_s=8,
    retired_memory_s=1e6,
)
TRANSPORT_S = 2.0
"""A posted write has landed, or never will, within this time: less than `quarantine_s`."""

FAULTS = ("late", "lose", "double", "break", "fail", "unnoticed", "crash p", "crash d", "hang p")
"""`late`: time passes while frames are under way."""


_MANY_STATES = ("late", "break", "hang p")
"""With these the larger configurations take minutes: lateness meets every order of events."""

EACH = [
    pytest.param(mode, fault, marks=[pytest.mark.long] if fault in _MANY_STATES else [], id=f"{mode}-{fault}")
    for mode in Mode
    for fault in FAULTS
]
"""Each mode with each kind of fault, as parameters of a test."""


@dataclass(frozen=True)
class Bounds:
    """How much may happen: prompts, their length in blocks, and faults by kind. The last `plain` of the prompts are
    neither aborted nor withdrawn."""

    transfers: int = 1
    blocks: int = 1
    faults: int = 1
    plain: int = 0
    kinds: tuple[str, ...] = FAULTS
    mode: Mode = Mode.PUSH

    @property
    def is_symmetric(self) -> bool:
        """Whether the same may happen to each prompt. Then the order in which they are asked for can be fixed: every
        other history is one of these with the names exchanged."""
        return self.plain in (0, self.transfers)

    @property
    def keys(self) -> tuple[Key, ...]:
        """One key per transfer."""
        return tuple(Key(TransferId(f"{i:032x}")) for i in range(self.transfers))
