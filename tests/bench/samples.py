"""Made-up answers and logs, for what is computed from them."""

from kvpush.bench.client import Answer
from kvpush.bench.logs import Leg, RoundLogs
from kvpush.core.errors import Reason
from kvpush.core.events import Outcome, Role, TransferRecord
from kvpush.core.ids import Key, TransferId
from kvpush.sim.steplog import LoggedRow, LoggedStep

ID = "ab" * 16


def step(
    launched: float, start: float, end: float, samples: bool = True, request: str = f"cmpl-{ID}-0-x"
) -> LoggedStep:
    return LoggedStep(launched=launched, start=start, end=end, rows=(LoggedRow(request, 0, 9, samples),))


def record(role: Role, **at: float) -> TransferRecord:
    return TransferRecord(
        key=Key(TransferId(ID)),
        role=role,
        request_id=None,
        peer="p",
        outcome=Outcome.DELIVERED,
        reason=Reason.OK,
        descriptors=160,
        nbytes=1000,
        at=at,
    )


def answer(sent: float, *chunks: float, transfer_id: str = ID) -> Answer:
    return Answer(
        request_id="r",
        sent=sent,
        ended=chunks[-1],
        chunks=chunks,
        text=" w0004",
        output_tokens=len(chunks),
        transfer_id=transfer_id,
    )


def pair_logs() -> RoundLogs:
    """A request that P computed in [10.1, 10.3) and D continued in [10.36, 10.38)."""
    return RoundLogs(
        prefill={ID: Leg(10.05, [step(10.1, 10.1, 10.3)])},
        decode={ID: Leg(10.06, [step(10.36, 10.36, 10.38)])},
        sent={ID: record(Role.SENDER, announced=10.1, registered=10.2, final=10.31, posted=10.312, written=10.34)},
        received={ID: record(Role.RECEIVER, requested=10.19, registered=10.192, noticed=10.345, ended=10.346)},
    )
