"""What becomes of the events about transfers: a log line each, and counters that can be merged and exported.

The transfer thread writes the log. Whoever drains its events adds them to `Counters`, on its own thread.
"""

import logging
from collections.abc import Callable

from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Ended, Event, ModeChosen, Outcome, PeerChanged, TransferRecord
from kvpush.runtime.ratelimit import RateLimit
from kvpush.runtime.recordfile import RecordFile

logger = logging.getLogger("kvpush.transfer")


_WANTED = frozenset({Reason.ABORTED, Reason.PREFILL_ABORTED, Reason.SHUTDOWN, Reason.NOT_ASKED_FOR, Reason.EVICTED})
"""Ends that somebody asked for, or that cost nothing but a computation: no matter of warning."""


class TransferLog:
    """One line per end of a transfer, with its key: debug for a delivery or an abort, warning (rate-limited) for the
    rest."""

    def __init__(self) -> None:
        self._limit = RateLimit()
        self._ready_limit = RateLimit(burst=1000, per_s=1.0)
        self._file = RecordFile()

    def record(self, event: Event, now: float) -> None:
        """Write the line of `event`, if it deserves one, at `now` (seconds)."""
        match event:
            case Ended(record):
                self._ended(record, now)
            case PeerChanged(peer, True):
                if self._ready_limit.allows("ready", now):
                    logger.info("peer ready peer=%s", peer)
            case PeerChanged(peer, False, reason, detail):
                self._warn(f"peer {reason}", now, lambda: f"peer gone peer={peer} reason={reason} detail={detail!r}")
            case ModeChosen(peer, mode, push, pull):
                logger.info("mode chosen peer=%s mode=%s push=%.0f pull=%.0f bytes/s", peer, mode, push, pull)
            case Counted(name, reason):
                logger.debug("counted %s reason=%s", name, reason)

    def close(self) -> None:
        """Close the file of records, if there is one. Idempotent."""
        self._file.close()

    def _ended(self, record: TransferRecord, now: float) -> None:
        self._file.write(record)
        if record.outcome is not Outcome.DELIVERED and record.reason not in _WANTED:
            self._warn(f"{record.role} {record.reason}", now, lambda: transfer_line(record))
        elif logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", transfer_line(record))

    def _warn(self, kind: str, now: float, line: Callable[[], str]) -> None:
        if self._limit.allows(kind, now):
            suppressed = self._limit.take_suppressed(kind)
            logger.warning("%s%s", line(), f" suppressed={suppressed}" if suppressed else "")


def transfer_line(record: TransferRecord) -> str:
    """One transfer's end as `name=value` pairs; each stage in milliseconds after the first."""
    first = min(record.at.values(), default=0.0)
    stages = " ".join(f"{stage}={(at - first) * 1000:.3f}ms" for stage, at in record.at.items())
    detail = f" detail={record.detail!r}" if record.detail else ""
    return (
        f"transfer ended key={record.key} role={record.role} mode={record.mode} "
        f"outcome={record.outcome} reason={record.reason} "
        f"request={record.request_id} peer={record.peer} tokens={record.tokens} blocks={record.blocks} "
        f"bytes={record.nbytes} descriptors={record.descriptors} {stages}{detail}"
    )
