"""How soon a sleeping transfer thread executes a command: the real thread, with nothing to move."""

import logging
import time

from kvpush.core.commands import Announce, Withdraw
from kvpush.core.errors import Reason
from kvpush.core.events import Ended, Event
from kvpush.core.ids import Address, EngineId, Key, RequestId, TransferId
from kvpush.core.layout import Layout
from kvpush.runtime.thread import ThreadConfig, TransferThread
from kvpush.transport.memory import MemoryFabric

_PAUSE_S = 0.005
"""Long enough for the thread to fall asleep."""


def wake_up_seconds(layout: Layout, repeats: int) -> list[float]:
    """Seconds from `submit` until the command was executed, one value per command."""

    config = ThreadConfig(engine_id=EngineId("micro"), listen=Address("127.0.0.1", 0), secret="0123456789abcdef")
    fabric = MemoryFabric()
    thread = TransferThread(config, layout, lambda: fabric.transport("micro"))
    thread.start()
    submitted: dict[str, float] = {}
    logger = logging.getLogger("kvpush.transfer")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # each of these transfers ends as withdrawn
    try:
        for i in range(repeats):
            time.sleep(_PAUSE_S)
            key = Key(TransferId(f"{i:032x}"))
            submitted[str(key)] = time.monotonic()
            thread.submit([Announce(key, RequestId(str(i)))])
            thread.submit([Withdraw(key, RequestId(str(i)), Reason.PREFILL_ABORTED)])
    finally:
        events = thread.stop()
        logger.setLevel(level)
    return _latencies(events, submitted)


def _latencies(events: list[Event], submitted: dict[str, float]) -> list[float]:
    records = [event.record for event in events if isinstance(event, Ended)]
    return [record.at["announced"] - submitted[str(record.key)] for record in records]
